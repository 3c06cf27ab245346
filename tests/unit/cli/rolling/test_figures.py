"""Requests before and during a roll."""

import pytest

from kvmesh.bus.messages import Outcome
from kvmesh.cli.rolling.figures import OutcomeLog, RequestFigures, worse

BEFORE = RequestFigures(100, 1, 0.1, 0.2)


def outcome(time: float, ttft_s: float | None, finish: str = "stop", choice: int = 0) -> Outcome:
    return Outcome(
        request="r",
        instance="worker-0-aa",
        time=time,
        cached_tokens=0,
        output_tokens=1,
        ttft_s=ttft_s,
        total_s=1.0,
        finish=finish,
        choice=choice,
    )


def test_a_window_counts_requests_by_their_end() -> None:
    log = OutcomeLog()
    for second in range(10):
        log.add(outcome(second, second / 10))
    log.add(outcome(5, None, "error"))
    log.add(outcome(5, 0.5, choice=1))  # of the same request
    assert log.between(5, 9) == RequestFigures(5, 1, 0.6, 0.8)
    assert log.between(20, 30) == RequestFigures()
    assert str(log.between(5, 6)) == "2 requests, 1 failed, first token p50 0.500 s, p90 0.500 s"
    assert str(RequestFigures()) == "no requests"


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (RequestFigures(20, 0, 0.1, 0.3), ""),
        (RequestFigures(20, 0, 0.1, 0.36), "the p90 of first tokens is 0.360 s, before 0.200 s"),
        (RequestFigures(9, 0, 0.1, 9.0), ""),  # too few
        (RequestFigures(20, 1, 0.1, 0.2), ""),
        (RequestFigures(20, 2, 0.1, 0.2), "2 of 20 requests failed, before 1 of 100"),
        (RequestFigures(1000, 15, 0.1, 0.2), ""),
        (RequestFigures(3, 3), "3 of 3 requests failed, before 1 of 100"),
        (RequestFigures(), ""),
    ],
)
def test_worse_means_failures_or_late_first_tokens(after: RequestFigures, reason: str) -> None:
    assert worse(BEFORE, after, 0.5) == reason


def test_without_requests_before_only_failures_count() -> None:
    assert worse(RequestFigures(), RequestFigures(50, 0, 1.0, 9.0), 0.5) == ""
    assert worse(RequestFigures(), RequestFigures(50, 2, 1.0, 9.0), 0.5) != ""
