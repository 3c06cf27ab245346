"""Removed blocks: the causes of a prompt, the bound, and the time since which all are known."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import Removal
from kvmesh.indexer.removed_blocks import MAX_RUNS, Cause, RemovedBlocks


def packed(*blocks: int) -> bytes:
    return array("Q", blocks).tobytes()


def cause(time: float, worker: str = "w", reason: str = "evicted", request: str = "") -> Cause:
    return Cause(worker, 0, time, reason, request or None)


def test_a_prompt_gets_the_causes_of_its_removed_blocks_in_order() -> None:
    removed = RemovedBlocks(100)
    removed.add(packed(4, 5), cause(2.0, reason="superseded"))
    removed.add(packed(2, 3), cause(1.0, request="r-9"))
    assert removed.find(packed(1, 2, 3, 4, 5, 6), 1) == [
        Removal(1, 2, "w", 0, 1.0, "evicted", "r-9"),
        Removal(3, 2, "w", 0, 2.0, "superseded", None),
    ]
    assert removed.find(packed(1, 2, 3), 0) == []
    assert removed.find(packed(2), 1) == []


def test_removals_of_one_cause_are_one_run_whose_time_is_the_latest() -> None:
    removed = RemovedBlocks(100)
    for block in (3, 2, 1):
        removed.add(packed(block), cause(10.0 - block))
    assert removed.find(packed(1, 2, 3), 0) == [Removal(0, 3, "w", 0, 9.0, "evicted", None)]


def test_the_newest_removal_of_a_block_counts() -> None:
    removed = RemovedBlocks(100)
    removed.add(packed(1), cause(1.0, "first"))
    removed.add(packed(1), cause(2.0, "second"))
    assert [run.worker for run in removed.find(packed(1), 0)] == ["second"]


def test_the_oldest_removals_are_forgotten_first_and_the_time_of_that_is_known() -> None:
    removed = RemovedBlocks(8)
    assert removed.since == 0.0
    for number in range(1, 101):
        removed.add(packed(number), cause(float(number)))
        assert len(removed) <= 8
        assert removed.find(packed(number), 0)
        known = [n for n in range(1, number + 1) if removed.find(packed(n), 0)]
        assert set(range(int(removed.since) + 1, number + 1)) <= set(known)
    assert removed.since > 90.0


def test_lost_events_move_the_time_since_which_all_removals_are_known() -> None:
    removed = RemovedBlocks(8, lambda: 7.0)
    removed.add(packed(1), cause(5.0))
    assert removed.since == 5.0
    removed.events_lost()
    assert removed.since == 7.0


def test_a_prompt_of_many_causes_gets_a_bounded_number_of_runs() -> None:
    removed = RemovedBlocks(1000)
    for block in range(200):
        removed.add(packed(block), cause(1.0, request=f"r-{block}"))
    assert len(removed.find(packed(*range(200)), 0)) == MAX_RUNS


def test_nothing_is_recorded_with_a_limit_of_0() -> None:
    removed = RemovedBlocks(0)
    removed.add(packed(1), cause(1.0))
    assert not removed.enabled
    assert len(removed) == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abc")), max_size=30),
    st.integers(0, 9),
)
def test_runs_are_the_causes_of_each_block(events: list[tuple[int, str]], first: int) -> None:
    removed, latest = RemovedBlocks(1000), {}
    for block, worker in events:
        removed.add(packed(block), cause(1.0, worker))
        latest[block] = worker
    prompt = list(range(1, 10))
    end = first
    while end < len(prompt) and prompt[end] in latest:
        end += 1
    if all(block not in latest for block in prompt[end:]):
        runs = removed.find(packed(*prompt), first)
        found = [run.worker for run in runs for _ in range(run.blocks)]
        assert found == [latest[block] for block in prompt[first:end]]


def test_blocks_evicted_one_by_one_are_one_run_with_the_latest_time() -> None:
    removed = RemovedBlocks(1000)
    for block in range(9):
        removed.add(packed(block), cause(float(block), request="r"))
    (run,) = removed.find(packed(*range(9)), 2)
    assert (run.first, run.blocks, run.time) == (2, 7, 8.0)
