"""Reads of a template's loops, told from its source: which rounds may be known. Pure."""

from collections.abc import Sequence
from typing import TypeGuard, cast

from jinja2 import nodes

BEGIN, ROUND, ITEM = "kvmesh begin loop", "kvmesh round", "kvmesh item"  # names of filters
MESSAGES = "messages"
_LOOP = frozenset(("index", "index0", "first", "last", "previtem", "nextitem"))
_REFUSED = (
    *(nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Block, nodes.Include, nodes.Import),
    *(nodes.FromImport, nodes.Extends, nodes.ContextReference, nodes.DerivedContextReference),
)


def instrument(template: nodes.Template) -> None:
    """Change the loops of a template's outermost level whose rounds may be known.

    Every loop begins with a statement that counts its rounds.
    """
    macros: set[str] = set()
    for macro in template.find_all(nodes.Macro):
        macros |= {name.name for name in macro.find_all(nodes.Name)} - {a.name for a in macro.args}
    for number, node in enumerate(template.body):
        if isinstance(node, nodes.For) and MESSAGES not in macros:
            _instrument(node, number, macros)


def _instrument(loop: nodes.For, number: int, macros: set[str]) -> None:
    if not isinstance(loop.target, nodes.Name) or loop.test is not None or loop.recursive:
        return
    reads = _Reads()
    for statement in loop.body:
        reads.visit(statement, inner=False)
    if reads.refused or loop.target.name in (MESSAGES, "loop"):
        return
    for item in reads.items:
        # visited in place, as its parent refers to it
        item.node = _filter(item.node, ITEM, [item.arg], item.lineno)
        item.arg = nodes.Const("value", lineno=item.lineno)
    names = sorted((reads.names | macros) - {loop.target.name, "loop"})
    values = nodes.Tuple([nodes.Name(name, "load") for name in names], "load")
    arguments = [nodes.Const(number), nodes.Name(MESSAGES, "load"), values, nodes.Const((*names,))]
    loop.iter = _filter(cast(nodes.Expr, loop.iter), BEGIN, arguments, loop.lineno)
    own = [nodes.Name("loop", "load")] if reads.loop else []
    loop.body[0] = nodes.ExprStmt(_filter(nodes.Const(None), ROUND, own, loop.lineno))


def _filter(
    node: nodes.Expr, name: str, arguments: Sequence[nodes.Expr], line: int
) -> nodes.Filter:
    return nodes.Filter(node, name, [*arguments], [], None, None, lineno=line)


class _Reads:
    """All that the rounds of a loop read; `refused` if that cannot be told."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.items: list[nodes.Getitem] = []  # of the messages
        self.loop = False
        self.refused = False

    def visit(self, node: nodes.Node, inner: bool) -> None:
        """`inner`: in a loop within the loop, which has a `loop` of its own."""
        if isinstance(node, _REFUSED):
            self.refused = True
        elif isinstance(node, nodes.Name):
            self.refused |= node.name in (MESSAGES, "loop") and not (inner and node.name == "loop")
            self.names.add(node.name)
        elif isinstance(node, nodes.NSRef):
            self.names.add(node.name)
        elif isinstance(node, nodes.Getattr) and _is_name(node.node, "loop") and not inner:
            self.loop = True
            self.refused |= node.attr not in _LOOP
        elif _is_item(node):
            self.items.append(node)
            self.visit(node.arg, inner)
        elif isinstance(node, nodes.For):
            for part, within in ((node.iter, inner), (node.target, True), (node.test, True)):
                if part is not None:
                    self.visit(part, within)
            for part in node.body:
                self.visit(part, True)
            for part in node.else_:
                self.visit(part, inner)
        else:
            for child in node.iter_child_nodes():
                self.visit(child, inner)


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_item(node: nodes.Node) -> TypeGuard[nodes.Getitem]:
    """True for a message by its index."""
    if not isinstance(node, nodes.Getitem) or isinstance(node.arg, nodes.Slice):
        return False
    return _is_name(node.node, MESSAGES)
