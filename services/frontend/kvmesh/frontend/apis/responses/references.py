"""References to stored items in the input of a response. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.apis.responses.items import RESPONSE_PREFIX, TOKEN_LENGTH
from kvmesh.frontend.errors import InvalidRequest

KIND = "item_reference"
MAX_BYTES = 32 << 20  # of the items that all references stand for
MAX_ESCAPED = 1024  # bytes of a reference whose type is written with escapes
# Items of the input have an "i" before their place, those of the output have none.
_ITEM_ID = re.compile(rf"[a-z]{{2,3}}_([0-9a-f]{{{TOKEN_LENGTH}}})(i?)([0-9a-f]{{2,4}})")


class ItemHead(Struct, omit_defaults=True):
    """The fields of an input item that tell a reference from other items."""

    id: str | None = None
    type: str | None = None
    role: str | None = None
    call_id: str | None = None

    @property
    def is_reference(self) -> bool:
        """True also for a bare id: the type is optional."""
        bare = self.type is None and self.role is None and self.call_id is None
        return self.type == KIND or (bare and self.id is not None)


_head = msgspec.json.Decoder(ItemHead)


def head_of(item: Raw) -> ItemHead:
    """The head of an item; an empty one if its fields have types of their own."""
    try:
        return _head.decode(item)
    except msgspec.ValidationError:
        return ItemHead()


Outputs = Mapping[str, Sequence[Raw]]  # output and other items by the id of their response
References = Mapping[str, Collection[int]]  # places of input items by the id of their response


def referenced_responses(items: Iterable[Raw]) -> References:
    """The responses that hold the referenced items, in order, and which of their input are meant.

    An item id that names no response stands for itself: there is none of that id.
    """
    found: dict[str, dict[int, None]] = {}
    for item in items:
        name = _item_of(item)
        if not name:
            continue
        match = _ITEM_ID.fullmatch(name)
        places = found.setdefault(RESPONSE_PREFIX + match[1] if match else name, {})
        if match and match[2]:
            places[int(match[3], 16)] = None
    return {response: list(places) for response, places in found.items()}


def resolve(items: Sequence[Raw], outputs: Outputs, where: str | None) -> list[Raw]:
    """The items with each reference replaced.

    Raises InvalidRequest that names a missing item and `where`, the parameter that holds the items,
    or for more than MAX_BYTES; without `where`, references to missing items stay.
    """
    stored: dict[str, Raw] = {}
    for output in outputs.values():
        stored |= {name: item for item in output if (name := head_of(item).id)}
    found, size = [], 0
    for item in items:
        resolved = _resolved(item, stored, where)
        size += len(resolved) if resolved is not item else 0
        if size > MAX_BYTES:
            raise InvalidRequest(f"The items referred to have more than {MAX_BYTES} bytes.", where)
        found.append(resolved)
    return found


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
    if len(data) > MAX_ESCAPED and KIND.encode() not in data and b'"type"' in data:
        return None  # without decoding a large item
    found = head_of(item)
    return found.id if found.is_reference else None
