"""Memory ranges of block transfers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transfer.memory_ranges import Allowed, Piece, Range, batches, merged, pack, unpack

PIECES = st.lists(st.builds(Piece, *[st.integers(0, 300)] * 2, st.integers(1, 40)), max_size=30)
RANGES = st.lists(st.builds(Range, st.integers(0, 300), st.integers(1, 40)), max_size=20)


def pairs(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Every byte on both sides."""
    return sorted((p.remote + i, p.local + i) for p in pieces for i in range(p.length))


def covered(part: Range) -> range:
    return range(part.offset, part.offset + part.length)


@given(PIECES)
def test_merging_moves_the_same_bytes_in_no_more_pieces(pieces: list[Piece]) -> None:
    joined = merged(pieces)
    assert pairs(joined) == pairs(pieces)
    assert len(joined) <= len(pieces)


def test_adjacent_pieces_are_merged() -> None:
    pieces = [Piece(i * 64, 1000 + i * 64, 64) for i in (3, 1, 0, 2)]
    assert merged(pieces) == [Piece(0, 1000, 256)]


@given(PIECES, st.integers(1, 64), st.integers(1, 5))
def test_batches_are_bounded_and_lose_nothing(pieces: list[Piece], size: int, most: int) -> None:
    cut = list(batches(pieces, size, most))
    assert pairs([piece for batch in cut for piece in batch]) == pairs(pieces)
    for batch in cut:
        assert 0 < len(batch) <= most
        assert sum(piece.length for piece in batch) <= size


@given(RANGES, RANGES)
def test_a_range_is_allowed_if_each_of_its_bytes_is(
    granted: list[Range], wanted: list[Range]
) -> None:
    open_bytes = {byte for each in granted for byte in covered(each)}
    refused = [each for each in wanted if not open_bytes.issuperset(covered(each))]
    assert Allowed(granted, 400).refused(wanted) == (refused[0] if refused else None)


@given(PIECES)
def test_packing_round_trip(pieces: list[Piece]) -> None:
    assert unpack(pack(pieces)) == [Range(p.remote, p.length) for p in pieces]


def test_half_a_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="pairs"):
        unpack(b"12345678")
