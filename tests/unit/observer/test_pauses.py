"""Pauses between turns: their reasons in words, and their lengths."""

import pytest

from kvmesh.bus.messages import Outcome
from kvmesh.observer.pauses import pauses_after, wait_text


@pytest.mark.parametrize(
    ("waits_for", "text"),
    [
        ([], "–"),
        (["tool", "Read"], "Read"),
        (["tool", "Bash", "npm test"], "Bash npm test"),
        (["tool", "Bash", "sleep", "64s"], "Bash sleep 64s"),
        (["human"], "user"),
        (["human", "no_tools"], "user (no tools)"),
        (["human", "AskUserQuestion"], "user (AskUserQuestion)"),
        (["end"], "nothing"),
        (["tool"], "tool"),
        (["future", "reason"], "future reason"),
    ],
)
def test_a_reason_has_words(waits_for: list[str], text: str) -> None:
    assert wait_text(waits_for) == text


def turn(arrived: float, ended: float) -> Outcome:
    return Outcome(
        request=f"r{arrived}", instance="w-1", time=ended, cached_tokens=0, output_tokens=1,
        ttft_s=None, total_s=ended - arrived, finish="stop",
    )  # fmt: skip


def test_a_pause_ends_with_the_next_arrival() -> None:
    turns = [turn(0.0, 2.0), turn(5.0, 6.0), turn(6.0, 9.0)]
    assert pauses_after(turns) == [3.0, 0.0, None]


def test_a_turn_that_runs_meanwhile_ends_no_pause() -> None:
    turns = [turn(0.0, 4.0), turn(1.0, 2.0), turn(7.0, 8.0)]
    assert pauses_after(turns) == [3.0, 5.0, None]
