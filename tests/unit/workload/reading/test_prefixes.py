"""Prefixes found from all ids at once equal those of a tree that grows by one prompt at a time."""

from array import array
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.workload.reading import prefixes as reading_prefixes
from kvmesh.workload.reading.prefixes import PART, joined, separate, shared_prefixes
from kvmesh.workload.reading.rows import TraceRow
from kvmesh.workload.reading.tree_builder import TreeBuilder
from kvmesh.workload.tree import Tree

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30)


def ids_of(paths: list[list[int]], wide: bool) -> "list[array[int]]":
    """Ids that stand for whole prefixes; with `wide`, spread over 64 bits."""
    known: dict[tuple[int, ...], int] = {}
    ids: list[array[int]] = []
    for path in paths:
        prefixes = [tuple(path[: n + 1]) for n in range(len(path))]
        numbers = [known.setdefault(prefix, len(known)) for prefix in prefixes]
        step = 0x9E3779B97F4A7C15 if wide else 1
        spread = [number * step % (1 << 64) for number in numbers]
        ids.append(array("Q" if wide else "iq"[len(ids) % 2], spread))
    return ids


def rows_of(*ids: Sequence[int]) -> list[TraceRow]:
    return [TraceRow(line=1, input_length=1, output_length=1, ids=each) for each in ids]


@pytest.mark.parametrize("part", [2, PART])
@given(PATHS, st.booleans())
def test_the_trees_are_equal(part: int, paths: list[list[int]], wide: bool) -> None:
    ids = ids_of(paths, wide)
    one, other = Tree(), Tree()
    builder = TreeBuilder(one, 16)
    rows = rows_of(*ids)
    together = joined(rows)
    assert together is not None
    flat, lengths = together
    with patch.object(reading_prefixes, "PART", part):
        prefixes = shared_prefixes(other, 16, flat, lengths)
    assert prefixes is not None
    for each in ids:
        assert builder.add(each) == prefixes.add(len(each))
        one.fork()  # outputs have branches in between
        other.fork()
    assert (one.parents, one.starts) == (other.parents, other.starts)
    separate(rows, flat)
    assert [row.ids for row in rows] == ids


@pytest.mark.parametrize(
    "ids", [[[1, 2], [3, 2]], [[1, 2], [2]], [[1, 1]], [[1, 2, 1]], [[5], [1, 2], [2, 1]]]
)
def test_an_id_behind_other_ids_is_no_prefix(ids: list[list[int]]) -> None:
    lengths = np.array([len(each) for each in ids])
    flat = array("q", [each for one in ids for each in one])
    assert shared_prefixes(Tree(), 16, flat, lengths) is None


def test_numbers_beyond_64_bits_are_left_to_the_builder() -> None:
    assert joined(rows_of([1 << 70], array("q", [1]))) is None
    assert joined(rows_of(array("q", [-1]), array("Q", [(1 << 64) - 1]))) is None
