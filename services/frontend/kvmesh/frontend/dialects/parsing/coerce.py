"""Types bare-text arguments by the schema of their tool."""

import ast
import json
from typing import Any, NoReturn
from urllib.parse import unquote

Schema = dict[str, Any]

_OF_PYTHON = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    type(None): "null",
}


def property_kinds(schema: Schema, name: str) -> frozenset[str]:
    """The JSON types that the schema allows for a property; empty if it states none."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    return _kinds(found, schema, 8)


def root_kinds(schema: Schema) -> frozenset[str]:
    """The JSON types of the values that a schema allows; empty if it allows any."""
    options = _listed(schema, "anyOf", "oneOf")
    if "type" not in schema and not all(_kinds(option, schema, 8) for option in options):
        return frozenset()
    return _kinds(schema, schema, 8)


def _kinds(node: Any, root: Schema, depth: int) -> frozenset[str]:
    if not isinstance(node, dict) or depth == 0:
        return frozenset()
    if isinstance(node.get("$ref"), str):
        return _kinds(resolve(node["$ref"], root), root, depth - 1)
    named = node.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    values = _listed(node, "enum") or ([node["const"]] if "const" in node else [])
    kinds = {_OF_PYTHON.get(type(value), "object") for value in values}
    for option in _listed(node, "anyOf", "oneOf", "allOf"):
        kinds |= _kinds(option, root, depth - 1)
    return frozenset(kinds)


def _listed(node: Schema, *keys: str) -> list[Any]:
    """The values listed under these keywords; none of a malformed one."""
    return [each for key in keys if isinstance(node.get(key), list) for each in node[key]]


def resolve(reference: str, root: Schema) -> Any:
    """The schema to which a pointer within `root` refers; None if there is none."""
    first, *parts = unquote(reference.removeprefix("#")).split("/")
    node: Any = None if first else root
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(key)] if key.isdecimal() and int(key) < len(node) else None
        else:
            node = node.get(key) if isinstance(node, dict) else None
    return node


def coerce(text: str, kinds: frozenset[str]) -> str:
    """`text` as JSON of one of `kinds`, as a string if none fits; without kinds, of any type."""
    trimmed = text.strip()
    if kinds == {"string"}:
        return _dump(text)
    for kind in ("null", "boolean", "integer", "number", "array", "object"):
        if kind in kinds:
            found = _of_kind(trimmed, kind)
            if found is not None:
                return found
    if "string" in kinds:
        return _dump(text)
    value = _literal(trimmed)
    return _dump(text if value is None and trimmed != "null" else value)


def _of_kind(text: str, kind: str) -> str | None:
    if kind == "null":
        return "null" if text.lower() in ("null", "none") else None
    if kind == "boolean":
        return text.lower() if text.lower() in ("true", "false") else None
    value = _literal(text)
    if kind == "integer":
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        return _dump(int(value)) if whole else None
    if kind == "number":
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        return _dump(value) if fits else None
    return _dump(value) if isinstance(value, list if kind == "array" else dict) else None


def _literal(text: str) -> Any:
    """The value of a JSON text or a Python literal; None if the text is neither."""
    try:
        return json.loads(text, parse_constant=_reject, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
