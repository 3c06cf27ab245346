"""Encoder and decoder of all messages, and the kind of a message before it is decoded."""

from typing import Any, Generic, TypeVar, overload

import msgspec

TAG = b"outcome"
TAG_WITHIN = 32  # bytes: the tag is the first field of a message
encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class MessageDecoder(Generic[T]):
    """Decodes messages of one `type`; raises msgspec.MsgspecError, and nothing else, for others.

    msgspec itself raises further errors for text that is not UTF-8 and for deep nesting.
    """

    __slots__ = ("_decode", "type")

    @overload
    def __init__(self: "MessageDecoder[T]", type: type[T]) -> None: ...
    @overload
    def __init__(self: "MessageDecoder[Any]", type: Any = Any) -> None: ...
    def __init__(self, type: Any = Any) -> None:  # noqa: A002
        self.type = type
        self._decode = msgspec.msgpack.Decoder(type).decode

    def decode(self, data: bytes | memoryview | bytearray) -> T:
        """The message; raises msgspec.MsgspecError."""
        try:
            return self._decode(data)  # type: ignore[no-any-return]
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(f"{error.__class__.__name__}: {error}") from None


def is_outcome(data: bytes) -> bool:
    """True for an encoded `Outcome`, of the messages of the route stream."""
    return TAG in data[:TAG_WITHIN]
