"""The bounds of JSON that is decoded at once: no other thread runs meanwhile. Pure."""

from collections.abc import Iterable, Iterator

from kvmesh.frontend.conversation import Message, ToolCall
from kvmesh.frontend.errors import ApiError

MAX_VALUES = 1 << 19
DEAR = 4  # an object, an array or a key takes as long to make as so many numbers
SLICE = 1 << 16


def check_values(body: bytes) -> None:
    """Refuse JSON of more values than can be made at once."""
    if _values(_slices(body)) > MAX_VALUES and _values(_bare(body)) > MAX_VALUES:
        raise ApiError("too_large", f"The body has more than {MAX_VALUES} JSON values.")


def check_arguments(messages: Iterable[Message]) -> None:
    """The same for the arguments of tool calls, which are JSON within texts of JSON."""
    blocks = (block for message in messages for block in message.blocks)
    texts = [b.arguments.encode() for b in blocks if isinstance(b, ToolCall) and not b.custom]
    if sum(_values(_slices(text)) for text in texts) <= MAX_VALUES:
        return
    if sum(_values(_bare(text)) for text in texts) > MAX_VALUES:
        reason = f"The arguments of tool calls have more than {MAX_VALUES} JSON values."
        raise ApiError("too_large", reason)


def _values(parts: Iterable[bytes]) -> int:
    return sum(
        part.count(b",") + DEAR * (part.count(b"{") + part.count(b"[") + part.count(b":"))
        for part in parts
    )


def _slices(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), SLICE):
        yield body[start : start + SLICE]


def _bare(body: bytes) -> Iterator[bytes]:
    """What stands outside of its texts."""
    start, inside = 0, False
    while start < len(body):
        part = body[start : start + SLICE]
        escapes = len(part) - len(part.rstrip(b"\\"))
        if escapes % 2 and len(part) > 1:
            part = part[:-1]  # what it escapes is in the next slice
        start += len(part)
        pieces = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
