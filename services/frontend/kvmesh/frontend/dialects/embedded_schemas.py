"""JSON schemas inside other documents: their references, rewritten for the new place. Pure.

A reference counts from the root of its document, so a schema that moves must take what it refers to
along. Engines also read references differently: some follow no list indices, escapes, anchors or
ids. All are therefore resolved here and written in the one form that each engine reads. So are the
lists of `items` by their place, which draft 2020-12 calls `prefixItems`.
"""

import contextlib
import re
from typing import Any
from urllib.parse import unquote, urljoin

ROOT = "#"
MAX_COPIED = 1000  # characters of a schema that may be copied to where it is referred to
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS = ("$anchor", "$dynamicAnchor")
# Values of these are maps from names to schemas, or data in which nothing is a schema.
_MAPS = frozenset(
    ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
)
_DATA = frozenset(("enum", "const", "default", "examples", "example", "required"))
_VALUES = frozenset(("const", "default", "example"))  # null is one
_ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    )
)
_MOVED = frozenset(
    ("$defs", "definitions", "$schema", "$id", "$recursiveAnchor", "discriminator", *_ANCHORS)
)
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")


def embedded(schema: Any, place: str = ROOT) -> Any:
    """The schema as it reads at `place`, a JSON pointer with `#`; `#` makes a whole document.

    Its `$defs` hold all that it refers to, and each reference has the form `PLACE/$defs/NAME`.
    References that lead out of the schema, or to nothing, stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    return _Copy(schema, place).schema()


def embedded_arguments(schema: dict[str, Any], place: str = ROOT) -> dict[str, Any]:
    """The schema of a tool's arguments at `place`: an object, also where it states no type."""
    made: dict[str, Any] = embedded(schema, place)
    return made if "type" in made or "$ref" in made else {"type": "object", **made}


class _Index:
    """The resources, anchors and references of a schema document."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._found: list[tuple[dict[str, Any], str, str]] = []
        self._resources[""] = root
        self._visit(root, "")

    def targets(self) -> dict[tuple[int, str], tuple[Any, str]]:
        """By node and keyword of each reference: what it refers to, and a name for that."""
        found = {}
        for node, keyword, base in self._found:
            target = self._resolve(node[keyword], base)
            if isinstance(target[0], dict | bool):
                found[id(node), keyword] = target
        return found

    def _visit(self, node: Any, base: str) -> None:
        if isinstance(node, list):
            for item in node:
                self._visit(item, base)
            return
        if not isinstance(node, dict):
            return
        base = self._note(node, base)
        for key, value in node.items():
            if key in _MAPS and isinstance(value, dict):
                for item in value.values():
                    self._visit(item, base)
            elif key not in _DATA:
                self._visit(value, base)

    def _note(self, node: dict[str, Any], base: str) -> str:
        own = node.get("$id")
        if isinstance(own, str):
            if own.startswith(ROOT):  # an anchor, until draft 7
                self._anchors.setdefault((base, own[1:]), node)
            else:
                base = _joined(base, own)
                self._resources.setdefault(base, node)
        for key in _ANCHORS:
            if isinstance(node.get(key), str):
                self._anchors.setdefault((base, node[key]), node)
        self._found += [(node, key, base) for key in _REFERENCES if isinstance(node.get(key), str)]
        return base

    def _resolve(self, reference: str, base: str) -> tuple[Any, str]:
        address, _, fragment = reference.partition(ROOT)
        address = _joined(base, address) if address else base
        if address not in self._resources:
            return None, ""
        found, name = self._resources[address], address.rsplit("/", 1)[-1]
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((address, fragment)), fragment
        for part in fragment.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None, ""
        return found, name


class _Copy:
    """A copy of a schema, with its references rewritten for a place."""

    def __init__(self, root: dict[str, Any], place: str) -> None:
        self._root = root
        self._place = place
        self._targets = _Index(root).targets()
        self._pointers: dict[int, str] = {id(root): place}
        self._named: dict[str, Any] = {}
        self._has_tuples = False
        self._plain: set[int] = set()  # ids of targets without parts
        for target, name in self._targets.values():
            if isinstance(target, dict) and id(target) not in self._pointers:
                self._pointers[id(target)] = f"{place}/$defs/{self._name(name, target)}"
                if _is_plain(target):
                    self._plain.add(id(target))

    def schema(self) -> dict[str, Any]:
        made = self._node(self._root)
        if self._named:
            made["$defs"] = {name: self._node(node) for name, node in self._named.items()}
        if "$schema" in self._root and self._place == ROOT and not self._has_tuples:
            made = {"$schema": self._root["$schema"], **made}
        return made

    def _name(self, name: str, target: Any) -> str:
        name = name if _PLAIN.fullmatch(name) else "schema"
        number, free = 2, name
        while free in self._named:
            free, number = f"{name}_{number}", number + 1
        self._named[free] = target
        return free

    def _inner(self, node: Any) -> Any:
        """A part: what is referred to elsewhere stands in `$defs` alone."""
        if isinstance(node, list):
            return [self._inner(item) for item in node]
        if not isinstance(node, dict):
            return node
        pointer = self._pointers.get(id(node))
        if pointer is not None:
            return {"$ref": pointer}
        lone, _ = self._targets.get((id(node), "$ref"), (None, ""))
        return lone if isinstance(lone, bool) and len(node) == 1 else self._node(node)

    def _node(self, node: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        references: list[dict[str, Any]] = []
        told_apart = "discriminator" in node and "anyOf" not in node
        listed = isinstance(node.get("items"), list)
        self._has_tuples |= listed
        for key, value in (_with_prefix_items(node) if listed else node).items():
            if told_apart and key == "oneOf":  # no more than one fits, which is hard to prove
                made["anyOf"] = self._inner(value)
            elif key in _MOVED or (value is None and key not in _VALUES):
                continue  # some senders write null for what they leave out
            elif (id(node), key) in self._targets:
                references.append(self._reference(id(node), key))
            elif key in _MAPS and isinstance(value, dict):
                made[key] = {name: self._inner(item) for name, item in value.items()}
            else:
                made[key] = value if key in _DATA else self._inner(value)
        if len(references) == 1 and made.keys() - _ANNOTATIONS:
            merged = self._beside(node, made)
            if merged is not None:
                return merged
        for reference in references:
            if made.keys() & reference.keys():
                others = made.get("allOf")
                made["allOf"] = [*(others if isinstance(others, list) else []), reference]
            else:
                made |= reference
        return made

    def _beside(self, node: dict[str, Any], made: dict[str, Any]) -> dict[str, Any] | None:
        """The keywords beside a reference with those of its target; None if they stay apart.

        Some engines ignore keywords beside a reference, and those of `allOf`.
        """
        key = next(key for key in _REFERENCES if (id(node), key) in self._targets)
        target, _ = self._targets[id(node), key]
        if id(target) not in self._plain:
            return None
        copy = self._node(target)
        return None if (copy.keys() & made.keys()) - _ANNOTATIONS else {**copy, **made}

    def _reference(self, node: int, keyword: str) -> dict[str, Any]:
        target, _ = self._targets[node, keyword]
        if isinstance(target, bool):
            return {} if target else {"not": {}}
        return {"$ref": self._pointers[id(target)]}


def _is_plain(schema: dict[str, Any]) -> bool:
    """True for a small schema without parts and references: a copy of it costs little."""
    nested = any(isinstance(v, dict | list) for k, v in schema.items() if k not in _DATA)
    return not nested and "$ref" not in schema and len(str(schema)) <= MAX_COPIED


def _with_prefix_items(node: dict[str, Any]) -> dict[str, Any]:
    """A schema of a list whose `items` are listed by their place, as draft 2020-12 writes it.

    It says that others may follow: some engines take a list without `items` as closed.
    """
    names = {"items": "prefixItems", "additionalItems": "items"}
    return {"items": True, **{names.get(key, key): value for key, value in node.items()}}


def _joined(base: str, address: str) -> str:
    with contextlib.suppress(ValueError):  # it is no address
        address = urljoin(base, address)
    return address.removesuffix(ROOT)
