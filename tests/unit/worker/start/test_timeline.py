"""Phases of a start: what counts where several processes are in different ones."""

import math
from threading import Thread
from time import monotonic

import pytest

from kvmesh.bus.messages import Phase, StartPhase
from kvmesh.worker.start.timeline import MOST_REPORTS, StartTimeline

S = StartPhase


def row(timeline: StartTimeline) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in timeline.row()}


def test_phases_are_listed_in_their_order_whatever_the_order_of_reports() -> None:
    timeline = StartTimeline(created=0.0)
    timeline.add(S.WEIGHTS, 3.0, 5.0)
    timeline.add(S.PROCESS, 0.0, 1.0)
    timeline.add(S.IMPORTS, 1.0, 3.0)
    assert timeline.row() == [Phase("process", 1.0), Phase("imports", 2.0), Phase("weights", 2.0)]


def test_the_slowest_rank_decides() -> None:
    timeline = StartTimeline(created=0.0)
    timeline.add(S.WEIGHTS, 0.0, 10.0)
    timeline.add(S.POST_PROCESSING, 10.0, 12.0)
    timeline.add(S.WEIGHTS, 0.0, 15.0)
    timeline.add(S.POST_PROCESSING, 15.0, 17.0)
    assert row(timeline) == {"weights": 15.0, "post-processing": 2.0}


def test_ranks_one_after_the_other_add_up() -> None:
    timeline = StartTimeline(created=0.0)
    timeline.add(S.IMPORTS, 0.0, 8.0)
    timeline.add(S.IMPORTS, 9.0, 17.0)
    assert row(timeline) == {"imports": 16.0}


def test_an_outer_phase_is_what_no_other_takes() -> None:
    timeline = StartTimeline(created=0.0)
    timeline.add(S.ENGINE, 0.0, 20.0, outer=True)
    timeline.add(S.WARM_UP, 10.0, 20.0, outer=True)
    timeline.add(S.KV_ALLOCATION, 16.0, 20.0, outer=True)
    timeline.add(S.COMPILE, 11.0, 15.0)
    timeline.add(S.WARM_UP, 18.0, 20.0)
    assert row(timeline) == {"KV allocation": 2.0, "compile": 4.0, "warm-up": 4.0, "engine": 10.0}
    assert [(s.phase, s.began, s.ended) for s in timeline.stretches()] == [
        ("engine", 0.0, 10.0),
        ("warm-up", 10.0, 11.0),
        ("compile", 11.0, 15.0),
        ("warm-up", 15.0, 16.0),
        ("KV allocation", 16.0, 18.0),
        ("warm-up", 18.0, 20.0),
    ]


def test_no_row_exceeds_the_time_since_the_creation() -> None:
    timeline = StartTimeline(created=10.0)
    assert timeline.add(S.IMPORTS, -50.0, 12.0)
    assert row(timeline) == {"imports": 2.0}


@pytest.mark.parametrize(
    ("phase", "began", "ended"),
    [
        ("tea", 1.0, 2.0),
        (S.WEIGHTS, 2.0, 1.0),
        (S.WEIGHTS, math.nan, 2.0),
        (S.WEIGHTS, 1, math.inf),
    ],
)
def test_absurd_reports_are_refused(phase: str, began: float, ended: float) -> None:
    timeline = StartTimeline(created=0.0)
    assert not timeline.add(phase, began, ended)
    assert timeline.row() == []


def test_reports_are_bounded() -> None:
    timeline = StartTimeline(created=0.0)
    added = [timeline.add(S.WEIGHTS, i, i + 0.5) for i in range(MOST_REPORTS + 1)]
    assert added == [True] * MOST_REPORTS + [False]


def test_the_present_phase_is_the_first_that_some_process_is_in() -> None:
    timeline = StartTimeline(created=0.0)
    changes: list[tuple[str, float] | None] = []
    timeline.on_change = lambda: changes.append(timeline.present())
    assert timeline.present() is None
    with timeline.phase(S.ENGINE, outer=True):
        timeline.enter("process 1", S.WEIGHTS, 5.0)
        timeline.enter("process 2", S.WEIGHTS, 6.0)
        timeline.enter("process 1", S.WARM_UP, 7.0)
        assert timeline.present() == ("weights", 6.0)
        timeline.leave("process 2")
        assert timeline.present() == ("warm-up", 7.0)
        timeline.enter("process 3", "tea", 8.0)
        timeline.leave("process 1")
        present = timeline.present()
        assert present is not None
        assert present[0] == "engine"
    assert timeline.present() is None
    assert changes[0] is not None
    assert changes[-1] is None


def test_phases_of_one_thread_nest_and_those_of_another_are_apart() -> None:
    timeline = StartTimeline(created=monotonic())

    def load() -> None:
        with timeline.phase(S.WEIGHTS):
            told.append(timeline.present())

    told: list[tuple[str, float] | None] = []
    with timeline.phase(S.ENGINE, outer=True):
        thread = Thread(target=load)
        thread.start()
        thread.join()
        with timeline.phase(S.KV_ALLOCATION):
            told.append(timeline.present())
        told.append(timeline.present())
    assert [each and each[0] for each in told] == ["weights", "KV allocation", "engine"]
    assert [phase.phase for phase in timeline.stretches()][-1] == "engine"
