"""Bodies beside their types: fields without effect, and the values that an invalid field allows."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args

from msgspec import Meta, inspect
from msgspec.inspect import (
    CustomType,
    ListType,
    LiteralType,
    Metadata,
    StrType,
    StructType,
    Type,
    UnionType,
)

MAX_SHOWN = 20
DEFINITION = "definition"
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_PATTERNS = {
    r"^[1-9][0-9]{0,4}[smhd]$": "a duration such as 30s, 5m, 1h or 2d",
    r"^(in[-_]memory|[1-9][0-9]{0,4}[smhd])$": "in_memory, or a duration such as 30m or 24h",
}


def unknown_fields(body: Any, kind: Any) -> Iterator[str]:
    """Paths of the fields of a decoded body that its type does not have, in order.

    Free-form objects, such as JSON schemas, have no unknown fields; nor have those of an unknown
    type.
    """
    return _unknown(body, [_type_of(kind)], "")


def defined_as(kind: Any) -> Meta:
    """Annotation of a raw value that is decoded as `kind` later: a struct, or a union of them."""
    refs = [{"$ref": f"#/components/schemas/{each.__name__}"} for each in get_args(kind) or (kind,)]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return Meta(extra={DEFINITION: kind}, extra_json_schema=schema)


def allowed_at(kind: Any, path: str) -> str:
    """The values that the type allows at a path of msgspec (`$.a[0].b`), or empty if unknown."""
    found = [_type_of(kind)]
    for name, _ in _STEP.findall(path):
        found = _flat(found)
        found = _fields(found, name) if name else _items(found)
    literals = [str(v) for t in _flat(found) if isinstance(t, LiteralType) for v in t.values]
    if literals:
        return ", ".join([*dict.fromkeys(literals)][:MAX_SHOWN])
    patterns = (t.pattern for t in _flat(found) if isinstance(t, StrType))
    return next((_PATTERNS[p] for p in patterns if p in _PATTERNS), "")


def list_fields(kind: Any) -> frozenset[str]:
    """The names of a struct's fields that are lists."""
    (struct,) = _flat([_type_of(kind)])
    return frozenset(f.encode_name for f in struct.fields if _items(_flat([f.type])))


@cache
def _type_of(kind: Any) -> Type:
    return inspect.type_info(kind)


def _flat(types: Sequence[Any]) -> list[Any]:
    """The types without metadata, with the members of unions in place of these."""
    found: list[Any] = []
    for kind in types:
        if isinstance(kind, Metadata):
            definition = (kind.extra or {}).get(DEFINITION)
            found += _flat([kind.type if definition is None else _type_of(definition)])
        elif isinstance(kind, UnionType):
            found += _flat(kind.types)
        else:
            found.append(kind)
    return found


def _items(types: Sequence[Any]) -> list[Any]:
    return [kind.item_type for kind in types if isinstance(kind, ListType)]


def _fields(types: Sequence[Any], name: str) -> list[Any]:
    structs = (kind for kind in types if isinstance(kind, StructType))
    return [f.type for kind in structs for f in kind.fields if f.encode_name == name]


def _unknown(value: Any, types: Sequence[Any], path: str) -> Iterator[str]:
    flat = _flat(types)
    if isinstance(value, list):
        items = _items(flat)
        if items:
            for index, item in enumerate(value):
                yield from _unknown(item, items, f"{path}[{index}]")
    elif isinstance(value, dict):
        structs = [kind for kind in flat if isinstance(kind, StructType)]
        if not structs or len(structs) < len([k for k in flat if _holds_objects(k)]):
            return  # free-form objects are allowed here, too
        tag = structs[0].tag_field
        if tag is not None:
            structs = [kind for kind in structs if kind.tag == value.get(tag)]
        for key, item in value.items() if structs else ():
            if key == tag:
                continue
            inner = f"{path}.{key}".lstrip(".")
            known = _fields(structs, key)
            if known:
                yield from _unknown(item, known, inner)
            else:
                yield inner


def _holds_objects(kind: Any) -> bool:
    scalars = (inspect.StrType, inspect.IntType, inspect.FloatType, inspect.BoolType)
    others = (inspect.NoneType, LiteralType, ListType, CustomType)
    return not isinstance(kind, (*scalars, *others))
