"""The native gather against a Python reference."""

from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh._native import gather
from kvmesh.index.interface import TIERS

BLOCK = 16


class Fleet(NamedTuple):
    """The arguments of `gather`, as lists; `columns` are by slot."""

    columns: list[tuple[float, float, float, float, float]]
    node_of_slot: list[int]
    groups: list[int]
    rows: list[tuple[int, int, int, int, int]]
    places: list[int]
    predicted: list[int]
    shared: list[int]
    slots: list[int]
    blocks: int


def expected(fleet: Fleet) -> tuple[list[list[float]], list[list[float]]]:
    """The reference, candidate by candidate."""
    size = len(fleet.columns)
    reach: list[list[float]] = [[0] * TIERS for _ in range(size + 1 + len(fleet.groups))]
    for number, *tiers in fleet.rows:
        reach[fleet.places[number]] = list(accumulate(tiers))
    nodes = reach[size + 1 :]
    last = [node[-1] for node in nodes]
    for node, group in zip(nodes, fleet.groups, strict=True):
        if group:
            pairs = zip(last, fleet.groups, strict=True)
            node[-1] = max(tier for tier, other in pairs if other == group)
    reach[size] = [0] * TIERS
    overlap, loads = [], []
    for slot in fleet.slots:
        beside = reach[size + (fleet.node_of_slot[slot] if fleet.groups else 0)]
        predicted = fleet.predicted[slot] if fleet.predicted else 0
        whole = [max(predicted, *pair) for pair in zip(reach[slot], beside, strict=True)]
        overlap.append([after - before for before, after in zip([0, *whole], whole, strict=False)])
        tokens, blocks, more_tokens, more_blocks, requests = fleet.columns[slot]
        decode = max(blocks + more_blocks, 0) - (fleet.shared[slot] - fleet.blocks)
        loads.append([max(tokens + more_tokens, 0) / BLOCK, decode, requests])
    return overlap, loads


def gathered(fleet: Fleet) -> tuple[list[list[float]], list[list[float]]]:
    count = len(fleet.slots)
    overlap, loads = np.empty((count, TIERS)), np.empty((3, count))
    most = gather(
        overlap,
        loads,
        np.array(fleet.slots, np.int64),
        np.array(fleet.columns, np.float64).T.tobytes(),
        np.array(fleet.node_of_slot, np.int64) if fleet.groups else b"",
        np.array(fleet.groups, np.int64),
        np.array(fleet.rows, "<u4").tobytes(),
        np.array(fleet.places, np.int64),
        np.array(fleet.predicted, np.float64),
        np.array(fleet.shared, np.float64),
        fleet.blocks,
        BLOCK,
    )
    assert most == max([0.0, *loads[1].tolist()])
    return overlap.tolist(), loads.T.tolist()


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    size, nodes = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    number, count = st.floats(-1e5, 1e5), st.integers(0, 40)
    ranks = draw(st.integers(1, 9))
    by_slot = partial(st.lists, min_size=size, max_size=size)
    return Fleet(
        columns=draw(by_slot(st.tuples(number, number, number, number, count))),
        node_of_slot=draw(by_slot(st.integers(0, nodes))),
        groups=draw(st.lists(st.integers(0, nodes), min_size=nodes, max_size=nodes)),
        rows=draw(st.lists(st.tuples(st.integers(0, ranks - 1), count, count, count, count))),
        places=draw(st.lists(st.integers(0, size + nodes), min_size=ranks, max_size=ranks)),
        predicted=draw(st.just([]) | by_slot(count)),
        shared=draw(by_slot(count)),
        slots=sorted(draw(st.sets(st.integers(0, size - 1)))),
        blocks=draw(count),
    )


@given(fleets())
def test_gather_equals_the_plain_python_reference(fleet: Fleet) -> None:
    assert gathered(fleet) == expected(fleet)


PLAIN = Fleet([(0, 0, 0, 0, 0)] * 2, [0, 0], [], [(0, 3, 0, 0, 0)], [1], [], [0, 0], [0, 1], 4)


@pytest.mark.parametrize(
    "wrong",
    [
        PLAIN._replace(slots=[2]),
        PLAIN._replace(slots=[-1]),
        PLAIN._replace(rows=[(1, 3, 0, 0, 0)]),
        PLAIN._replace(places=[3]),
        PLAIN._replace(places=[-1]),
        PLAIN._replace(predicted=[1], slots=[1]),
        PLAIN._replace(groups=[0], node_of_slot=[0, 2]),
        PLAIN._replace(groups=[2]),
        PLAIN._replace(groups=[-1]),
        PLAIN._replace(columns=[(0, 0, 0, 0, 0)]),
    ],
)
def test_indices_out_of_range_are_refused(wrong: Fleet) -> None:
    with pytest.raises(IndexError):
        gathered(wrong)


def test_outputs_of_the_wrong_size_are_refused() -> None:
    slots, none = np.zeros(1, np.int64), np.zeros(1)
    for overlap, loads in ((np.empty((1, 3)), np.empty((3, 1))), (np.empty((1, 4)), np.empty(2))):
        with pytest.raises(ValueError, match="for each slot"):
            gather(overlap, loads, slots, bytes(40), b"", b"", b"", b"", b"", none, 1, BLOCK)
