"""Bounds of the number of values in JSON, whose decoding holds the GIL throughout. Pure."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvmesh.frontend.conversation import Message, ToolCall
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo

MAX_VALUES = 1 << 19
SMALL = 128 << 10  # bytes of any JSON, which decodes in little time
LIGHT_BYTES = 512 << 10
LIGHT_VALUES = 1 << 16
COMPOUND_WEIGHT = 4  # decoding an object, an array or a key costs as much as so many numbers
SLICE_BYTES = 1 << 16
_CASE = 0x20
_ARGUMENTS = "size of the arguments of calls"


def is_light(body: bytes) -> bool:
    """True for JSON that the event loop may decode: it is small, or most of it is few texts."""
    if len(body) < SMALL:
        return True
    return len(body) < LIGHT_BYTES and separators(body) <= LIGHT_VALUES


def check_values(body: bytes) -> None:
    """Raises ApiError (413) for JSON with more than `MAX_VALUES` values."""
    if _count(_slices(body)) > MAX_VALUES and _count(_outside_strings(body)) > MAX_VALUES:
        raise ApiError("too_large", f"The body has more than {MAX_VALUES} JSON values.")


def check_arguments(messages: Sequence[Message], memo: TurnMemo = NO_MEMO) -> None:
    """Same bound for the arguments of tool calls, which are JSON within strings."""
    same, checked = memo.recall(_ARGUMENTS, messages)
    start, size = checked if checked is not None and checked[0] <= same else (0, 0)
    for message in messages[start:]:
        for block in message.blocks:
            if type(block) is ToolCall and not block.custom:
                size += len(block.arguments)
    memo.note(_ARGUMENTS, messages, (len(messages), size))
    if COMPOUND_WEIGHT * size <= MAX_VALUES:
        return
    blocks = (block for message in messages for block in message.blocks)
    arguments = [b.arguments for b in blocks if isinstance(b, ToolCall) and not b.custom]
    texts = [text.encode() for text in arguments]
    if sum(_count(_slices(text)) for text in texts) <= MAX_VALUES:
        return
    if sum(_count(_outside_strings(text)) for text in texts) > MAX_VALUES:
        reason = f"The arguments of tool calls have more than {MAX_VALUES} JSON values."
        raise ApiError("too_large", reason)


def _count(parts: Iterable[bytes]) -> int:
    """Estimated number of values, from the separators."""
    return sum(map(separators, parts))


def separators(part: bytes) -> int:
    """Estimated number of values of JSON without strings; too high with such."""
    text = np.frombuffer(part, np.uint8)
    compound = (text | _CASE) == ord("{")  # "[" and "{" differ in this bit
    compound |= text == ord(":")
    others = np.count_nonzero(text == ord(","))
    return int(others) + COMPOUND_WEIGHT * int(np.count_nonzero(compound))


def _slices(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), SLICE_BYTES):
        yield body[start : start + SLICE_BYTES]


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The parts of JSON outside of strings."""
    start, inside = 0, False
    while start < len(body):
        part = body[start : start + SLICE_BYTES]
        escapes = len(part) - len(part.rstrip(b"\\"))
        if escapes % 2 and len(part) > 1:
            part = part[:-1]  # the escaped character is in the next slice
        start += len(part)
        pieces = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
