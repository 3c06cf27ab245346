"""Parts of a memory region: which are allowed, which belong together."""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Range(NamedTuple):
    """`length` bytes from `offset` on."""

    offset: int
    length: int


class Piece(NamedTuple):
    """`length` bytes at `remote` of the other region, wanted at `local` of one's own."""

    remote: int
    local: int
    length: int


def check_range(offset: int, length: int, size: int) -> None:
    """Raise ValueError unless the range is in a region of `size` bytes and not empty."""
    if offset < 0 or length <= 0 or offset + length > size:
        raise ValueError(f"{length} bytes at {offset} are not in a region of {size}")


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same in as few pieces as possible, by their place in the other region."""
    joined: list[Piece] = []
    for piece in sorted(pieces):
        last = joined[-1] if joined else None
        if last and _follows(last, piece):
            joined[-1] = last._replace(length=last.length + piece.length)
        else:
            joined.append(piece)
    return joined


def cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """The same in pieces of at most `most` bytes."""
    for remote, local, length in pieces:
        for done in range(0, length, most):
            yield Piece(remote + done, local + done, min(most, length - done))


def batches(pieces: Iterable[Piece], most_bytes: int, most: int) -> Iterator[list[Piece]]:
    """Runs of about `most_bytes` bytes and at most `most` pieces."""
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
    """The ranges of a grant; raises ValueError for one outside of a region of `size` bytes."""

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
        """The first of `ranges` that is not wholly allowed."""
        for wanted in ranges:
            place = bisect_right(self._starts, wanted.offset) - 1
            if place < 0 or wanted.length <= 0 or sum(wanted) > self._ends[place]:
                return wanted
        return None


def pack(pieces: Iterable[Piece]) -> bytes:
    """Remote offsets and lengths, as pairs of little-endian uint64."""
    numbers = [number for piece in pieces for number in (piece.remote, piece.length)]
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack(packed: bytes) -> list[Range]:
    """What `pack` packed; raises ValueError if that cannot be."""
    if len(packed) % 16:
        raise ValueError(f"{len(packed)} bytes are not pairs of 64-bit numbers")
    return [Range(*pair) for pair in struct.iter_unpack("<QQ", packed)]


def _follows(last: Piece, piece: Piece) -> bool:
    end, local_end = last.remote + last.length, last.local + last.length
    return piece.remote == end and piece.local == local_end
