"""JSON objects that are decoded by their `type`; those of unknown types stay as they are."""

from typing import Any, Generic, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Raw

from kvmesh.frontend.apis.base import decode, decode_part
from kvmesh.frontend.apis.sealed_reasoning import Sealed

T = TypeVar("T")
Foreign: TypeAlias = dict[str, Any]  # an object whose type is unknown


class TaggedDecoder(Generic[T]):
    """Decodes the members of a union of structs that have tags."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(union)
        self._known = {kind.__struct_config__.tag for kind in get_args(union)}

    def decode(self, raw: Raw, where: str) -> T | Foreign:
        """Raises InvalidRequest with the field, but never for one of an unknown type."""
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError:
            value = decode_part(raw, where)
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in self._known:
            return value  # type: ignore[no-any-return]  # a dict, as its type shows
        return decode(self._decoder, bytes(raw), where)


class Reading:
    """State of the translation of one body."""

    def __init__(self) -> None:
        self.sealed = Sealed()
        self.skipped: list[str] = []  # paths of what no prompt can show
        self.refers = False  # to items that are stored
        self.trigger = ""  # path of an item that asks for a summary

    @property
    def is_plain(self) -> bool:
        """True if the messages are all that has been read."""
        return not (self.skipped or self.sealed.bytes or self.refers or self.trigger)
