"""References to stored items in the input of a response. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.apis.responses.items import RESPONSE_PREFIX, TOKEN_LENGTH
from kvmesh.frontend.errors import InvalidRequest

KIND = "item_reference"
_ITEM_ID = re.compile(rf"[a-z]{{2,3}}_([0-9a-f]{{{TOKEN_LENGTH}}})[0-9a-f]{{2,4}}")


class _Reference(Struct):
    id: str | None = None
    type: str | None = None
    role: str | None = None


_reference = msgspec.json.Decoder(_Reference)
Outputs = Mapping[str, Sequence[Raw]]  # output items by the id of their response


def is_reference(kind: str | None, role: str | None, item_id: str | None) -> bool:
    """True for a reference; its type is optional."""
    return kind == KIND or (kind is None and role is None and item_id is not None)


def referenced_responses(items: Iterable[Raw]) -> list[str]:
    """Ids of the responses whose output holds the referenced items, each once, in order."""
    names = (_item_of(item) for item in items)
    matches = (_ITEM_ID.fullmatch(name) for name in names if name)
    return list(dict.fromkeys(RESPONSE_PREFIX + match[1] for match in matches if match))


def resolve(items: Sequence[Raw], outputs: Outputs, where: str | None) -> list[Raw]:
    """The items with each reference replaced.

    Raises InvalidRequest that names a missing item and `where`, the parameter that holds the items;
    without `where`, references to missing items stay.
    """
    stored: dict[str, Raw] = {}
    for output in outputs.values():
        stored |= {name: item for item in output if (name := _reference.decode(item).id)}
    return [_resolved(item, stored, where) for item in items]


def _resolved(item: Raw, stored: Mapping[str, Raw], where: str | None) -> Raw:
    name = _item_of(item)
    if name is None:
        return item
    if name not in stored and where is not None:
        reason = f"Item with id '{name}' not found: its response was not stored, or has expired."
        raise InvalidRequest(reason, where)
    return stored.get(name, item)


def _item_of(item: Raw) -> str | None:
    """The id of the item that this item refers to; None for one that is no reference."""
    data = bytes(item)
    if KIND.encode() not in data and b'"type"' in data:
        return None  # without decoding a large item
    found = _reference.decode(data)
    return found.id if is_reference(found.type, found.role, found.id) else None
