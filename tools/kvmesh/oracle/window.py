"""The latest requests of all models, bounded in time and memory; no I/O."""

from collections import OrderedDict

from msgspec.structs import replace

from kvmesh.bus.messages import Decision, Outcome, RouteEvent, of_class
from kvmesh.workload.capture import CapturedRound

MOST_REQUESTS = 8192
REQUEST_BYTES = 1024  # of a request beside its hashes


class RequestWindow:
    """Pairs decisions with outcomes; a migrated request counts from its last placement.

    It keeps the requests that ended in the last `window_s` seconds, MOST_REQUESTS of them and
    `most_bytes` of block hashes at most; the oldest go first. Prefetches do not count.
    """

    def __init__(self, window_s: float, most_bytes: int) -> None:
        self._window_s = window_s
        self._most_bytes = most_bytes
        self._bytes = 0
        self._running: OrderedDict[str, Decision] = OrderedDict()
        self._ended: OrderedDict[str, CapturedRound] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, event: RouteEvent, now: float) -> None:
        """Add a decision or an outcome; `now` in Unix seconds."""
        if isinstance(event, Outcome):
            self._end(event)
        elif event.prefetch is None:
            self._place(event)
        self._expire(now)

    def requests(
        self, model: str, since: float, besides: frozenset[str] = frozenset()
    ) -> list[CapturedRound]:
        """The ended requests of a model that arrived from `since` on, by arrival.

        Those of the classes `besides` are left out.
        """
        found = [
            each
            for each in self._ended.values()
            if each.decision.model == model
            and each.arrival >= since
            and not of_class(each.decision.hints, besides)
        ]
        return sorted(found, key=lambda each: each.arrival)

    def _place(self, decision: Decision) -> None:
        before = self._running.pop(decision.request, None)
        slim = replace(decision, candidates=[])
        self._running[decision.request] = slim
        self._bytes += _size(slim) - (_size(before) if before is not None else 0)

    def _end(self, outcome: Outcome) -> None:
        decision = self._running.pop(outcome.request, None)
        if decision is None:
            return
        self._ended[outcome.request] = CapturedRound(
            decision=decision,
            outcome=outcome,
            arrival=decision.time - decision.wait_s,
            end=outcome.time,
        )

    def _expire(self, now: float) -> None:
        ended, running = self._ended, self._running
        while ended and (
            len(ended) > MOST_REQUESTS
            or self._bytes > self._most_bytes
            or not now - next(iter(ended.values())).end <= self._window_s
        ):
            self._bytes -= _size(ended.popitem(last=False)[1].decision)
        while running and (
            len(running) > MOST_REQUESTS
            or self._bytes > self._most_bytes
            or not now - next(iter(running.values())).time <= self._window_s
        ):
            self._bytes -= _size(running.popitem(last=False)[1])


def _size(decision: Decision) -> int:
    return REQUEST_BYTES + len(decision.sequence_hashes)
