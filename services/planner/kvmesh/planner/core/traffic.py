"""The requests of one model, from the events of routers and frontends."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from kvmesh.bus.messages import Decision, Outcome, RouteEvent, SeqAdd, SeqEvent, SeqFree, SeqWait
from kvmesh.planner.capacity.queueing import RequestShape
from kvmesh.planner.core.promises import Promise, covers

MOST_REQUESTS = 8192
MOST_WAITING = 65_536
OUTPUT_GUESS = 256.0
GRACE_S = 5.0  # by which the clocks of routers may differ
FEWEST_KEPT = 10
OUTPUT_SHARE = 0.02  # weight of a new output in the mean
COLD_S = 120.0  # for so long, a new worker's cache holds less than those of the others


@dataclass(slots=True)
class ObservedRequest:
    """One request: Unix seconds and tokens; results and `queue`, the wait, are -1 until known.

    `cold` tokens were cached on another worker, and computed because a new one took the request.
    """

    arrived: float
    prompt: int
    uncached: int
    cold: int = 0
    request_class: str = ""
    output: int = -1
    ttft: float = -1.0
    itl: float = -1.0
    queue: float = -1.0


@dataclass(frozen=True, slots=True)
class MeasuredShare:
    """The share of `requests` requests that kept a promise."""

    share: float
    requests: int


@dataclass(frozen=True, slots=True)
class NewWork:
    """An arrival: Unix seconds, tokens to compute, expected output tokens."""

    at: float
    uncached: int
    output: float


class ObservedTraffic:
    """Arrivals, waits and results of the latest requests, MOST_REQUESTS at most.

    Arrivals count when routers accept them: completions lag behind an overload and hide it. Times
    of events after `latest` are those of a clock that is ahead: they count as `latest`. `offset` is
    added to the times of events.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._requests: OrderedDict[str, ObservedRequest] = OrderedDict()
        self._waiting: OrderedDict[str, tuple[float, int, float]] = OrderedDict()
        self._joined: dict[str, float] = {}
        self.offset = 0.0
        self.mean_output = OUTPUT_GUESS

    def joined(self, instance: str, now: float) -> None:
        """A worker is ready from now on, with an empty cache."""
        self._joined.setdefault(instance, now)

    def left(self, instance: str) -> None:
        """A worker has left."""
        self._joined.pop(instance, None)

    @property
    def waiting(self) -> int:
        """Requests in the queues of all routers."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Their tokens to compute."""
        return sum(cost for _, cost, _ in self._waiting.values())

    def oldest_wait(self, now: float) -> float:
        """Seconds that the oldest of them has waited."""
        return max((now - arrived for arrived, _, _ in self._waiting.values()), default=0.0)

    def on_sequence(self, event: SeqEvent, latest: float = inf) -> NewWork | None:
        """Apply an event of active sequences; returns the arrival that it shows, if any."""
        if isinstance(event, SeqWait):
            known = event.request in self._requests or event.request in self._waiting
            arrived, cost = self._time(event.arrived, latest), max(event.cost, 1)
            if not isfinite(arrived):
                return None
            self._waiting[event.request] = arrived, cost, event.deadline + self.offset
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)
            if not known:
                return self._arrive(event.request, ObservedRequest(arrived, cost, cost))
        elif isinstance(event, SeqAdd | SeqFree):
            self._waiting.pop(event.request, None)
        return None

    def on_route(self, event: RouteEvent, latest: float = inf) -> NewWork | None:
        """Apply a decision or an outcome; returns the arrival that it shows, if any."""
        if isinstance(event, Outcome):
            self._finish(event)
            return None
        return None if event.prefetch is not None else self._place(event, latest)

    def _time(self, time: float, latest: float) -> float:
        time += self.offset
        return time if time <= latest else latest  # latest for NaN too

    def _place(self, decision: Decision, latest: float) -> NewWork | None:
        self._waiting.pop(decision.request, None)
        rank = decision.prefill or decision.chosen
        cached = sum(rank.overlap) * decision.block_size
        known = self._requests.get(decision.request)
        arrived = self._time(decision.time - decision.wait_s, latest)
        if not isfinite(arrived):
            return None
        request = known or ObservedRequest(arrived, 0, 0)
        request.prompt = decision.tokens
        request.uncached = max(decision.tokens - cached, 1)
        new = arrived - self._joined.get(rank.instance, -inf) < COLD_S
        if new and decision.prefill is None:
            best = max((sum(each.overlap) for each in decision.candidates), default=0)
            request.cold = max(best * decision.block_size - cached, 0)
        request.request_class = decision.hints.fair_class or decision.hints.tenant or ""
        request.queue = decision.wait_s
        if known is None and not decision.attempt:
            return self._arrive(decision.request, request)
        return None

    def _arrive(self, name: str, request: ObservedRequest) -> NewWork:
        self._requests[name] = request
        if len(self._requests) > MOST_REQUESTS:
            self._requests.popitem(last=False)
        return NewWork(request.arrived, request.uncached, self.mean_output)

    def _finish(self, outcome: Outcome) -> None:
        request = self._requests.get(outcome.request)
        if request is None:
            return
        request.uncached = max(request.prompt - outcome.cached_tokens, 1)
        request.output = outcome.output_tokens
        self.mean_output += OUTPUT_SHARE * (outcome.output_tokens - self.mean_output)
        if outcome.ttft_s is not None:
            request.ttft = outcome.ttft_s
            if outcome.output_tokens > 1:
                request.itl = (outcome.total_s - outcome.ttft_s) / (outcome.output_tokens - 1)

    def expire(self, now: float) -> None:
        """Forget the requests that are older than the window, and waits beyond their deadline."""
        requests = self._requests
        while requests:
            name, request = next(iter(requests.items()))
            if now - request.arrived <= self._window_s:
                break
            del requests[name]
        # the end of a wait is lost with its router
        overdue = [
            name
            for name, (arrived, _, deadline) in self._waiting.items()
            if not now <= min(deadline, arrived + self._window_s) + GRACE_S
        ]
        for name in overdue:
            del self._waiting[name]

    def kept(
        self, promise: Promise, promises: Sequence[Promise], since: float, now: float
    ) -> MeasuredShare | None:
        """The share of requests that arrived after `since` and kept a promise; None if too few.

        `promises` are all promises: they decide the classes that this one covers. The class of a
        request that waits in a router is unknown: each promise covers it.
        """
        covered = covers(promise, promises)
        values: list[float] = [
            value
            for request in self._requests.values()
            if request.arrived >= since
            and covered(request.request_class)
            and (value := getattr(request, promise.metric)) >= 0
        ]
        count = len(values)
        if promise.metric != "itl":  # those that still wait have broken it already
            count += sum(now - at > promise.seconds for at, _, _ in self._waiting.values())
        if count < FEWEST_KEPT:
            return None
        return MeasuredShare(sum(value <= promise.seconds for value in values) / count, count)

    def mean_lengths(self, since: float) -> tuple[float, float]:
        """Mean prompt tokens of the requests after `since`, and those to compute; zeros if none."""
        recent = [r for r in self._requests.values() if r.arrived >= since]
        if not recent:
            return 0.0, 0.0
        count = len(recent)
        return sum(r.prompt for r in recent) / count, sum(r.uncached for r in recent) / count

    def latest(self, most: int) -> list[ObservedRequest]:
        """Up to `most` of the latest requests, in the order of their arrival."""
        chosen: list[ObservedRequest] = []
        for request in reversed(self._requests.values()):
            if len(chosen) == most:
                break
            chosen.append(request)
        chosen.sort(key=lambda request: request.arrived)
        return chosen

    def shape(self, request: ObservedRequest, at: float, cold: bool = False) -> RequestShape:
        """The request as it would arrive at `at`; an unknown output has the mean length.

        Without `cold`, tokens that a worker has computed because it was new are left out.
        """
        output = request.output if request.output >= 0 else int(self.mean_output)
        prompt = request.prompt
        uncached = request.uncached if cold else max(request.uncached - request.cold, 1)
        return RequestShape(at, uncached, prompt, max(output, 1), request.request_class)
