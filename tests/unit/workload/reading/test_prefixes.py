"""Prefixes found from all ids at once equal those of a tree that grows by one prompt at a time."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.workload.reading.prefixes import joined, shared_prefixes
from kvmesh.workload.reading.tree_builder import TreeBuilder
from kvmesh.workload.tree import Tree

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30)


def ids_of(paths: list[list[int]], wide: bool) -> "list[array[int]]":
    """Ids that stand for whole prefixes; with `wide`, spread over 64 bits."""
    known: dict[tuple[int, ...], int] = {}
    ids = []
    for path in paths:
        prefixes = [tuple(path[: n + 1]) for n in range(len(path))]
        numbers = [known.setdefault(prefix, len(known)) for prefix in prefixes]
        step = 0x9E3779B97F4A7C15 if wide else 1
        ids.append(array("Q", [number * step % (1 << 64) for number in numbers]))
    return ids


@given(PATHS, st.booleans())
def test_the_trees_are_equal(paths: list[list[int]], wide: bool) -> None:
    ids = ids_of(paths, wide)
    one, other = Tree(), Tree()
    builder = TreeBuilder(one, 16)
    flat = joined(ids)
    assert flat is not None
    prefixes = shared_prefixes(other, 16, *flat)
    assert prefixes is not None
    for each in ids:
        assert builder.add(each) == prefixes.add(len(each))
        one.fork()  # outputs have branches in between
        other.fork()
    assert (one.parents, one.starts) == (other.parents, other.starts)


@pytest.mark.parametrize(
    "ids", [[[1, 2], [3, 2]], [[1, 2], [2]], [[1, 1]], [[1, 2, 1]], [[5], [1, 2], [2, 1]]]
)
def test_an_id_behind_other_ids_is_no_prefix(ids: list[list[int]]) -> None:
    lengths = np.array([len(each) for each in ids])
    flat = np.array([each for one in ids for each in one], np.int64)
    assert shared_prefixes(Tree(), 16, flat, lengths) is None


def test_numbers_beyond_64_bits_are_left_to_the_builder() -> None:
    assert joined([[1 << 70], array("q", [1])]) is None
    assert joined([array("q", [-1]), array("Q", [(1 << 64) - 1])]) is None
