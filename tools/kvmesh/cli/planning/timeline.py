"""Arrivals of requests, from captured traffic or from a workload."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.workload.capture import CapturedRound
from kvmesh.workload.model import Workload


@dataclass(frozen=True)
class ServiceTime:
    """Assumed times of a request whose service has not been measured, in seconds."""

    ttft_s: float
    itl_s: float

    def of(self, output_tokens: int) -> float:
        """From the arrival to the last token."""
        return self.ttft_s + self.itl_s * max(0, output_tokens - 1)


def series(arrivals: Sequence[float], interval_s: float) -> list[float]:
    """Requests in each interval, from the first arrival on; the last, partial one is left out.

    `arrivals` are in order, in seconds. Empty if all requests arrive within one interval.
    """
    if not arrivals:
        return []
    begin = arrivals[0]
    counts = [0.0] * int((arrivals[-1] - begin) / interval_s)
    for arrival in arrivals:
        index = int((arrival - begin) / interval_s)
        if index < len(counts):
            counts[index] += 1
    return counts


def from_captured(captured: Sequence[CapturedRound]) -> list[float]:
    """The measured arrivals in order, in seconds; prefetches are no requests."""
    return sorted(each.arrival for each in captured if each.decision.prefetch is None)


def from_workload(workload: Workload, service: ServiceTime) -> list[float]:
    """The arrivals of the workload's requests in order, if each took its service time."""
    starts: list[float] = []
    ends: list[float] = []
    for round_ in workload.rounds:
        after = max((ends[index] for index in round_.after), default=0.0)
        starts.append(after + round_.at_s)
        tokens = round_.output_tokens
        if round_.abort_after is not None:
            tokens = min(tokens, round_.abort_after)
        ends.append(starts[-1] + service.of(tokens))
    return sorted(starts)
