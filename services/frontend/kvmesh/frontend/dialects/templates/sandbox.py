"""A Jinja environment in which a model's own template can neither escape nor run away.

Bounds are counts, not clocks, so that a rendering never depends on the machine's mood: loop
rounds and calls together, and the size of every string that is built.
"""

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.templates.prompt_json import dumps

MAX_STEPS = 1_000_000
MAX_CHARS = 16 << 20
MAX_EXPONENT = 64
PROBE_STEPS = 10_000
_TICK, _BOUNDED = "kvmesh tick", "kvmesh bounded"  # no template can name these
_PRIVATE = frozenset(n for kind in (str, LoopContext) for n in dir(kind) if n.startswith("_"))
_DICT_ATTRIBUTES = frozenset(dir(dict))
_HARMLESS: dict[type, frozenset[str]] = {
    str: frozenset(dir(str)) - {"format", "format_map"} - _PRIVATE,
    LoopContext: frozenset(dir(LoopContext)) - _PRIVATE,
}

_AnyNode = TypeVar("_AnyNode", bound=nodes.Node)

_steps_left: ContextVar[int] = ContextVar("steps_left", default=MAX_STEPS)


class Environment(ImmutableSandboxedEnvironment):
    """Sandboxed, with bounded work, and with what templates written for Transformers expect."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
        )
        self.filters.update(tojson=tojson, **{_TICK: tick, _BOUNDED: bounded})
        self.globals["raise_exception"] = raise_exception
        # whichever dict lacks a name, the same is said of it
        self._absent = lru_cache(lambda name: self.undefined(obj={}, name=name))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Meter().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What Jinja's sandbox would find, in a tenth of its time for most that templates read."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self._absent(attribute)
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        if kind is Namespace and attribute[:1] != "_" and hasattr(obj, attribute):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        tick(context)
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str:
            for ours in ("_loop_vars", "_block_vars"):
                kwargs.pop(ours, None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > MAX_EXPONENT:
            raise TemplateError(f"the chat template raised a number to the power {right}")
        if operator == "*" and _product(left, right) > MAX_CHARS:
            raise TemplateError(f"the chat template built more than {MAX_CHARS} characters")
        return bounded(super().call_binop(context, operator, left, right))


class _Meter(NodeTransformer):
    """Counts every round of every loop and checks the size of every concatenation."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), _TICK)))
        return _located(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _located(_filtered(node, _BOUNDED))


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    """Filters are called as they are; calls would be checked as a stranger's."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context  # or it would be called once, when the template is compiled
def tick(context: Context, _: object = None) -> None:
    """Count one step of the rendering under way."""
    left = _steps_left.get() - 1
    if left < 0:
        raise TemplateError("the chat template runs for too many steps")
    _steps_left.set(left)


def bounded(value: Any) -> Any:
    """`value`, unless it is too long."""
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARS:
        raise TemplateError(f"the chat template built more than {MAX_CHARS} characters")
    return value


def _located(node: _AnyNode) -> _AnyNode:
    node.set_lineno(node.lineno)
    if node.environment is not None:
        node.set_environment(node.environment)
    return node


class _Generation(Extension):
    """The block `{% generation %}` marks the assistant's tokens for training: nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _product(left: Any, right: Any) -> int:
    """The length of a repeated sequence; 0 for plain numbers."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            return len(sequence) * times
    return 0


@contextmanager
def metered(steps: int) -> Iterator[None]:
    """One rendering's allowance of steps."""
    token = _steps_left.set(steps)
    try:
        yield
    finally:
        _steps_left.reset(token)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: list[str] | tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Transformers writes it into prompts: no HTML escapes, no ASCII escapes."""
    return dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=(separators[0], separators[1]) if separators else None,
        sort_keys=sort_keys,
    )


def strftime(day: datetime.date) -> Callable[[str], str]:
    """`strftime_now` for templates: midnight of a given day, so that prompts of a day agree."""
    midnight = datetime.datetime.combine(day, datetime.time.min)
    return midnight.strftime


def render(template: jinja2.Template, variables: dict[str, Any], steps: int = MAX_STEPS) -> str:
    """The template's output within the bounds; raises TemplateError for all that goes wrong."""
    size, parts = 0, []
    context = template.new_context(variables)
    try:
        with metered(steps):
            for part in template.root_render_func(context):
                size += len(part)
                if size > MAX_CHARS:
                    raise TemplateError(f"the prompt is longer than {MAX_CHARS} characters")
                parts.append(part)
    except TemplateError:
        raise
    except RecursionError as error:
        raise TemplateError("the chat template recurses without end") from error
    # A template is a program of strangers: any exception type can leave it.
    except Exception as error:
        raise TemplateError(f"the chat template failed: {error}") from error
    finally:
        context.vars.clear()  # macros and their context point at each other
    return "".join(parts)
