"""Errors and times to the first token before and during a roll. Pure."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.bus.messages import Outcome

MOST_KEPT = 100_000
FEW = 10  # requests, of which a quantile says little
SLACK_S = 0.05
MOST_ERRORS = 1  # that any roll may meet, as clients send wrong requests, too
ERROR_SHARE = 0.01


class RequestFigures(NamedTuple):
    """Requests that ended in a time: number, those that failed, quantiles of TTFT in seconds.

    The quantiles are None without any first token.
    """

    requests: int = 0
    failed: int = 0
    p50_s: float | None = None
    p90_s: float | None = None

    def __str__(self) -> str:
        if not self.requests:
            return "no requests"
        text = f"{self.requests} requests, {self.failed} failed"
        if self.p50_s is None or self.p90_s is None:
            return text
        return f"{text}, first token p50 {self.p50_s:.3f} s, p90 {self.p90_s:.3f} s"


class _Ended(NamedTuple):
    time: float
    ttft_s: float | None
    failed: bool


class OutcomeLog:
    """The latest outcomes, by their time in Unix seconds."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=MOST_KEPT)

    def add(self, outcome: Outcome) -> None:
        """Count the first choice of a request."""
        if not outcome.choice:
            failed = outcome.finish == "error"
            self._ended.append(_Ended(outcome.time, outcome.ttft_s, failed))

    def between(self, start: float, end: float) -> RequestFigures:
        """The figures of the requests that ended from `start` on and before `end`."""
        return _figures([each for each in self._ended if start <= each.time < end])


def _figures(ended: Iterable[_Ended]) -> RequestFigures:
    found = list(ended)
    times = sorted(each.ttft_s for each in found if each.ttft_s is not None)
    failed = sum(each.failed for each in found)
    if not times:
        return RequestFigures(len(found), failed)
    return RequestFigures(len(found), failed, _quantile(times, 0.5), _quantile(times, 0.9))


def _quantile(times: list[float], share: float) -> float:
    ranks = [(number + 1) / len(times) for number in range(len(times))]
    return times[min(bisect_left(ranks, share), len(times) - 1)]


def worse(before: RequestFigures, after: RequestFigures, tolerance: float) -> str:
    """The reason why requests fare worse than before, empty if they do not.

    First tokens may take longer by the share `tolerance`, and by SLACK_S.
    """
    allowed = before.failed / before.requests if before.requests else 0.0
    if after.failed > MOST_ERRORS and after.failed / after.requests > allowed + ERROR_SHARE:
        return (
            f"{after.failed} of {after.requests} requests failed,"
            f" before {before.failed} of {before.requests}"
        )
    if before.p90_s is None or after.p90_s is None or min(before.requests, after.requests) < FEW:
        return ""
    if after.p90_s > before.p90_s * (1 + tolerance) + SLACK_S:
        return f"the p90 of first tokens is {after.p90_s:.3f} s, before {before.p90_s:.3f} s"
    return ""
