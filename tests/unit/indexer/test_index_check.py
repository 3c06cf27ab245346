"""Comparison of a rank with its worker, at one event id."""

from array import array
from collections.abc import Sequence

import pytest
from unit.indexer.test_rank_state import Mesh, card, removed, stored

from kvmesh.bus.messages import Cleared, ControlReply, IndexCheck, KvEvent, RankKey, Stored
from kvmesh.index.fingerprints import HashRun, digest, fingerprints
from kvmesh.index.interface import OverlapSegment
from kvmesh.indexer.index_check import compare, describe, indexed_blocks

W = RankKey("w-1", 0)
Taken = list[Sequence[OverlapSegment] | None]


def reply(*blocks: int, listed: bool = True) -> ControlReply:
    """A worker's reply whose blocks are named as in `stored`."""
    engine = array("Q", (block + 1000 for block in blocks)).tobytes()
    found = fingerprints([HashRun(0, engine, array("Q", blocks).tobytes())])
    packed = found.astype("<u8").tobytes() if listed else b""
    return ControlReply(True, blocks=len(found), digest=digest(found), fingerprints=packed)


def mesh(*events: KvEvent) -> Mesh:
    found = Mesh()
    found.states.joined(card("w-1"))
    found.batch(0, *events)
    return found


def check(found: Mesh, *blocks: int, listed: bool = True) -> IndexCheck:
    rank = found.states.rank("w-1", 0)
    assert rank is not None
    return compare(
        indexed_blocks(found.states.index.dump(rank.slot)), reply(*blocks, listed=listed)
    )


def test_an_equal_index_is_equal() -> None:
    found = check(mesh(stored(1, 2, 3), removed(2)), 1, 3)
    assert found == IndexCheck(result="equal", held=2, indexed=2, missing=0, extra=0)


def test_missing_and_extra_blocks_are_counted() -> None:
    found = check(mesh(stored(1, 2, 3)), 2, 3, 4, 5)
    assert (found.result, found.held, found.indexed) == ("differs", 4, 3)
    assert (found.missing, found.extra) == (2, 1)
    assert "lacks 2 of 4 blocks (store events were lost) and has 1 that are gone" in describe(found)


def test_too_many_blocks_to_list_still_differ() -> None:
    found = check(mesh(stored(1, 2)), 1, 3, listed=False)
    assert (found.result, found.missing, found.extra) == ("differs", None, None)
    assert "2 blocks, the worker 2" in describe(found)


def test_the_checkpoint_is_between_two_events_of_a_batch() -> None:
    found, taken = mesh(stored(1)), Taken()
    assert found.states.take_at(W, 3, taken.append)
    assert not found.states.take_at(W, 3, taken.append)  # one at a time
    found.batch(1, stored(2))
    assert taken == []
    found.batch(2, stored(3), stored(4), removed(1))
    assert [len(indexed_blocks(segments or [])) for segments in taken] == [3]
    assert check(found, 2, 3, 4).result == "equal"


def test_a_present_checkpoint_is_taken_at_once_and_a_past_one_never() -> None:
    found, taken = mesh(stored(1), stored(2)), Taken()
    assert found.states.take_at(W, 2, taken.append)
    assert len(taken) == 1
    assert not found.states.take_at(W, 1, taken.append)


@pytest.mark.parametrize("cause", ["gap", "dump", "left", "unknown"])
def test_a_checkpoint_is_void_if_the_rank_is_not_known_up_to_it(cause: str) -> None:
    found, taken = mesh(stored(1)), Taken()
    if cause == "unknown":
        found.states.mark_all_unknown()
    assert found.states.take_at(W, 4, taken.append)
    if cause == "gap":
        found.batch(2, stored(2), stored(3), stored(4))
    elif cause == "dump":  # of a publisher that dropped its backlog: the ids are used again
        found.batch(1, Cleared(), stored(1))
        found.batch(3, stored(2), stored(3))
    elif cause == "left":
        found.states.left(card("w-1"))
    assert taken == [None]


def test_known_ranks_of_workers_take_turns() -> None:
    found = mesh(stored(1))
    found.states.joined(card("v-1", name="v", ranks=2))
    found.batch(0, stored(1), instance="v-1", worker="v")
    first = found.states.next_worker_rank(RankKey("", 0))
    assert first == RankKey("v-1", 0)
    assert found.states.next_worker_rank(first) == W
    assert found.states.next_worker_rank(W) == first
    found.states.mark_all_unknown()
    assert found.states.next_worker_rank(W) is None


def test_a_doubted_rank_waits_for_a_dump() -> None:
    found = mesh(stored(1))
    found.states.doubt(W)
    assert not found.states.is_known(W)
    found.states.due_dumps(0.0, 1.0)
    assert found.states.due_dumps(5.0, 1.0) == [W]
    engine = array("Q", [1001]).tobytes()
    found.batch(1, Cleared(), Stored(0, None, engine, array("Q", [1]).tobytes(), 7))
    assert found.states.is_known(W)
