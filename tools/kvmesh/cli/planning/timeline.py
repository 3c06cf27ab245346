"""Arrivals and ends of requests, from captured traffic or from a workload."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvmesh.planner.prediction.scoring import SessionEvent
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


@dataclass(frozen=True)
class Timeline:
    """Arrival times of all requests in order, in seconds, and the events of their sessions."""

    arrivals: list[float]
    events: list[SessionEvent]

    def series(self, interval_s: float) -> list[float]:
        """Requests in each interval, from the first arrival on; the last, partial one is left out.

        Empty if all requests arrive within one interval.
        """
        if not self.arrivals:
            return []
        begin = self.arrivals[0]
        counts = [0.0] * int((self.arrivals[-1] - begin) / interval_s)
        for arrival in self.arrivals:
            index = int((arrival - begin) / interval_s)
            if index < len(counts):
                counts[index] += 1
        return counts


def from_captured(captured: Sequence[CapturedRound]) -> Timeline:
    """The measured times; prefetches are no requests, and requests without a session no events."""
    requests = [each for each in captured if each.decision.prefetch is None]
    events: list[SessionEvent] = []
    for each in requests:
        decision, outcome = each.decision, each.outcome
        if (session := decision.hints.session) is not None:
            tokens = decision.tokens
            events.append(SessionEvent(time=each.arrival, session=session, tokens=tokens))
            events.append(
                SessionEvent(
                    time=max(each.end, each.arrival),
                    session=session,
                    finish=outcome.finish,
                    final=decision.hints.session_final,
                    tokens=tokens + outcome.output_tokens,
                )
            )
    return _timeline([each.arrival for each in requests], events)


def from_workload(workload: Workload, service: ServiceTime) -> Timeline:
    """The times at which the workload's requests would come, if each took its service time.

    A request before a tool's wait finishes with "tool_calls", before any other wait with "stop".
    """
    starts: list[float] = []
    ends: list[float] = []
    for round_ in workload.rounds:
        after = max((ends[index] for index in round_.after), default=0.0)
        starts.append(after + round_.at_s)
        tokens = round_.output_tokens
        if round_.abort_after is not None:
            tokens = min(tokens, round_.abort_after)
        ends.append(starts[-1] + service.of(tokens))
    final = workload.final_rounds()
    finishes = dict(_finishes(workload))
    events: list[SessionEvent] = []
    for index, round_ in enumerate(workload.rounds):
        session, tokens = str(round_.session), round_.input_tokens
        events.append(SessionEvent(time=starts[index], session=session, tokens=tokens))
        events.append(
            SessionEvent(
                time=ends[index],
                session=session,
                finish=finishes[index],
                final=index in final,
                tokens=tokens + round_.output_tokens,
            )
        )
    return _timeline(starts, events)


def _finishes(workload: Workload) -> Iterator[tuple[int, str]]:
    """The finish reason of each round, by the wait before the session's next one."""
    for members in workload.by_session():
        for index, following in zip(members, [*members[1:], None], strict=True):
            round_ = workload.rounds[index]
            if round_.abort_after is not None and round_.abort_after < round_.output_tokens:
                yield index, "cancelled"
            elif following is None or workload.rounds[following].wait in ("", "human", "pause"):
                yield index, "stop"
            else:
                yield index, "tool_calls"


def _timeline(arrivals: list[float], events: list[SessionEvent]) -> Timeline:
    # At equal times an end comes first, so that the next request of its session follows it.
    ordered = sorted(events, key=lambda event: (event.time, event.finish is None))
    return Timeline(sorted(arrivals), ordered)
