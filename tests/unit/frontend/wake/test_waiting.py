"""Counting of waiting sequences, and the times of their wakes."""

import pytest

from kvmesh.bus.messages import Wake
from kvmesh.frontend.errors import Overloaded
from kvmesh.frontend.wake.waker import INTERVAL_S, REPEAT_S, WaitingSequences

SOON = INTERVAL_S / 2


def wake(model: str, request: str, waiting: int, tokens: int, time: float) -> Wake:
    return Wake(
        model=model, frontend="f-1", request=request, waiting=waiting, tokens=tokens, time=time
    )


def test_the_first_sequence_is_due_at_once_and_later_ones_after_the_interval() -> None:
    waiting = WaitingSequences("f-1", 9)
    waiting.add("m", "a", 10, 5.0)
    assert waiting.due(5.0, 105.0) == [wake("m", "a", 1, 10, 105.0)]
    waiting.add("m", "b", 20, 5.0 + SOON)
    assert waiting.due(5.0 + SOON, 0.0) == []
    assert waiting.due(5.0 + INTERVAL_S, 106.0) == [wake("m", "a", 2, 30, 106.0)]


def test_wakes_are_repeated_while_sequences_wait() -> None:
    waiting = WaitingSequences("f-1", 9)
    waiting.add("m", "a", 10, 0.0)
    assert len(waiting.due(0.0, 0.0)) == 1
    assert waiting.due(REPEAT_S - SOON, 0.0) == []
    assert len(waiting.due(REPEAT_S, 0.0)) == 1
    waiting.remove("m", "a")
    assert waiting.due(2 * REPEAT_S, 0.0) == []
    assert waiting.counts() == {}


def test_sequences_that_come_and_go_post_no_more_than_one_wake_in_an_interval() -> None:
    waiting = WaitingSequences("f-1", 9)
    posted = 0
    for step in range(40):
        now = step * INTERVAL_S / 10
        waiting.add("m", f"s{step}", 1, now)
        posted += len(waiting.due(now, 0.0))
        waiting.remove("m", f"s{step}")
        posted += len(waiting.due(now, 0.0))
    assert posted == 4


def test_each_model_has_its_own_wakes() -> None:
    waiting = WaitingSequences("f-1", 9)
    waiting.add("m", "a", 1, 0.0)
    assert len(waiting.due(0.0, 0.0)) == 1
    waiting.add("n", "b", 2, SOON)
    assert waiting.due(SOON, 1.0) == [wake("n", "b", 1, 2, 1.0)]
    assert waiting.counts() == {"m": 1, "n": 1}


def test_the_limit_counts_the_sequences_of_all_models() -> None:
    waiting = WaitingSequences("f-1", 2)
    waiting.add("m", "a", 1, 0.0)
    waiting.add("n", "b", 1, 0.0)
    with pytest.raises(Overloaded):
        waiting.add("m", "c", 1, 0.0)
    waiting.remove("n", "b")
    waiting.add("m", "c", 1, 0.0)
    assert waiting.counts() == {"m": 2, "n": 0}
