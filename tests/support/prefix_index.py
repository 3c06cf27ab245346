"""Helpers of the prefix index tests: factories, hash arrays, decoded results."""

from collections.abc import Callable, Iterable
from struct import iter_unpack, pack

import pytest

from kvmesh.index import PrefixIndex, create_index
from support.reference_index import ReferencePrefixIndex

Factory = Callable[[], PrefixIndex]
FACTORIES = [
    pytest.param(ReferencePrefixIndex, id="reference"),
    pytest.param(create_index, id="native"),
]


def hashes(values: Iterable[int]) -> bytes:
    return b"".join(pack("<Q", value) for value in values)


def rows(answer: bytes) -> dict[int, tuple[int, ...]]:
    """Rank to one number per tier."""
    decoded = list(iter_unpack("<5I", answer))
    assert len({row[0] for row in decoded}) == len(decoded), "a rank has two rows"
    return {rank: tuple(counts) for rank, *counts in decoded}
