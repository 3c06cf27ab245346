"""Ranges of a memory region: bounds checks, merging, batching and packing."""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Range(NamedTuple):
    """`length` bytes from `offset` on."""

    offset: int
    length: int


class Piece(NamedTuple):
    """`length` bytes at `remote` of the owner's region, to be copied to `local` of the reader's."""

    remote: int
    local: int
    length: int


def check_range(offset: int, length: int, size: int) -> None:
    """Raise ValueError unless the range is not empty and within a region of `size` bytes."""
    if offset < 0 or length <= 0 or offset + length > size:
        raise ValueError(f"{length} bytes at {offset} are not in a region of {size}")


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent pieces; returns them by their offset in the owner's region."""
    joined: list[Piece] = []
    for piece in sorted(pieces):
        last = joined[-1] if joined else None
        if last and _follows(last, piece):
            joined[-1] = last._replace(length=last.length + piece.length)
        else:
            joined.append(piece)
    return joined


def cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Split pieces into pieces of at most `most` bytes."""
    for remote, local, length in pieces:
        for done in range(0, length, most):
            yield Piece(remote + done, local + done, min(most, length - done))


def batches(pieces: Iterable[Piece], most_bytes: int, most: int) -> Iterator[list[Piece]]:
    """Yield batches of about `most_bytes` bytes and at most `most` pieces."""
    batch: list[Piece] = []
    size = 0
    for piece in cut(pieces, most_bytes):
        if batch and (size + piece.length > most_bytes or len(batch) == most):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.length
    if batch:
        yield batch


class Allowed:
    """The ranges of a grant; raises ValueError for a range outside a region of `size` bytes."""

    def __init__(self, ranges: Iterable[Range], size: int) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for offset, length in sorted(ranges):
            check_range(offset, length, size)
            if self._ends and offset <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], offset + length)
            else:
                self._starts.append(offset)
                self._ends.append(offset + length)

    def refused(self, ranges: Iterable[Range]) -> Range | None:
        """Return the first of `ranges` that is not wholly allowed, or None."""
        for wanted in ranges:
            index = bisect_right(self._starts, wanted.offset) - 1
            if index < 0 or wanted.length <= 0 or sum(wanted) > self._ends[index]:
                return wanted
        return None


def pack(pieces: Iterable[Piece]) -> bytes:
    """Pack remote offsets and lengths as pairs of little-endian uint64."""
    numbers = [number for piece in pieces for number in (piece.remote, piece.length)]
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack(packed: bytes) -> list[Range]:
    """Reverse `pack`; raises ValueError if `packed` is malformed."""
    if len(packed) % 16:
        raise ValueError(f"{len(packed)} bytes are not pairs of 64-bit numbers")
    return [Range(*pair) for pair in struct.iter_unpack("<QQ", packed)]


def _follows(last: Piece, piece: Piece) -> bool:
    end, local_end = last.remote + last.length, last.local + last.length
    return piece.remote == end and piece.local == local_end
