"""The latest requests: placements, progress while they run, outcomes. Pure."""

from collections import OrderedDict
from collections.abc import Iterator

from kvmesh.bus.messages import (
    Decision,
    Outcome,
    RouteEvent,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqProgress,
    SeqWait,
)
from kvmesh.frontend.namespaces import own_name
from kvmesh.observer.prefetch_uses import base_id

MOST_REQUESTS = 20_000
REQUEST_BYTES = 2048  # of a request beside its hashes
MOST_ATTEMPTS = 8  # the last ones are kept
PREFILL_MARK = "#prefill"
PREFETCH_ID = "pf_"


class SeenRequest:
    """One request: its placements in order, its outcomes by choice, and its progress.

    `state` is "waiting" in a router's queue, "prefill" or "decode" in engines, or "ended". Times
    are in Unix seconds. `generated` counts output tokens, about every block of them.
    """

    __slots__ = (
        "arrived",
        "decisions",
        "generated",
        "instance",
        "outcomes",
        "request",
        "sequence",
        "state",
    )

    def __init__(self, request: str, arrived: float) -> None:
        self.request = request
        self.arrived = arrived
        self.decisions: list[Decision] = []
        self.outcomes: list[Outcome] = []
        self.generated = 0
        self.instance = ""
        self.sequence = ""  # the id of the last attempt
        self.state = "waiting"

    @property
    def decision(self) -> Decision | None:
        """The latest placement."""
        return self.decisions[-1] if self.decisions else None

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of the first choice."""
        return self.outcomes[0] if self.outcomes else None

    @property
    def session(self) -> str:
        if (outcome := self.outcome) is not None:
            return own_name(outcome.session)
        decision = self.decision
        return own_name(decision.hints.session or "") if decision is not None else ""

    @property
    def tenant(self) -> str:
        if (outcome := self.outcome) is not None:
            return outcome.tenant
        decision = self.decision
        return (decision.hints.tenant or "") if decision is not None else ""

    @property
    def model(self) -> str:
        if self.decisions:
            return self.decisions[-1].model
        return self.outcomes[0].model if self.outcomes else ""

    @property
    def hashes(self) -> bytes:
        """The packed sequence hashes of the prompt; empty before it is placed."""
        return self.decisions[-1].sequence_hashes if self.decisions else b""


class RequestLog:
    """The requests of the last `window_s` seconds, the oldest of them dropped at a bound.

    The bounds are MOST_REQUESTS and `most_bytes` of memory. Prefetches do not count.
    """

    def __init__(self, window_s: float, most_bytes: int) -> None:
        self._window_s = window_s
        self._most_bytes = most_bytes
        self._bytes = 0
        self._requests: OrderedDict[str, SeenRequest] = OrderedDict()
        self._running: dict[str, SeenRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request: str) -> SeenRequest | None:
        """A request by its id; also by that of one of its attempts, or the client's own id."""
        found = self._requests.get(base_id(request)) or self._requests.get(request)
        return found or next((r for r in self.latest() if _client_named(r, request)), None)

    def latest(self) -> Iterator[SeenRequest]:
        """All requests, the one that arrived last first."""
        return reversed(self._requests.values())

    def running(self) -> list[SeenRequest]:
        """The requests that wait or run, in the order of their arrival."""
        return list(self._running.values())

    def add_route(self, event: RouteEvent, now: float) -> None:
        """Add a decision or an outcome."""
        if isinstance(event, Outcome):
            self._end(event, now)
        elif event.prefetch is None:
            self._place(event, now)
        self._expire(now)

    def add_sequence(self, event: SeqEvent, now: float) -> None:
        """Follow the progress of a sequence; the part of a request on a prefill worker is ignored.

        Events of requests that have ended come late, and change nothing.
        """
        if event.request.endswith(PREFILL_MARK) or event.request.startswith(PREFETCH_ID):
            return
        request = base_id(event.request)
        if isinstance(event, SeqWait | SeqAdd):
            self._start(request, event)
            self._expire(now)
            return
        running = self._running.get(request)
        if running is None or running.sequence != event.request:
            return  # an earlier attempt
        if isinstance(event, SeqFree):
            del self._running[request]
        else:
            running.state = "decode"
            if isinstance(event, SeqProgress):
                running.generated = max(running.generated, event.generated)

    def _start(self, request: str, event: SeqWait | SeqAdd) -> None:
        arrived = event.arrived if isinstance(event, SeqWait) else event.time
        seen = self._seen(request, arrived)
        if seen.state == "ended":
            return
        seen.state, seen.sequence = "waiting", event.request
        if isinstance(event, SeqAdd):
            seen.state, seen.instance = "prefill", event.instance
        self._running[request] = seen

    def _seen(self, request: str, arrived: float) -> SeenRequest:
        seen = self._requests.get(request)
        if seen is None:
            seen = self._requests[request] = SeenRequest(request, arrived)
            self._bytes += REQUEST_BYTES
        return seen

    def _place(self, decision: Decision, now: float) -> None:
        seen = self._seen(base_id(decision.request), decision.time - decision.wait_s)
        self._bytes -= len(seen.hashes)
        seen.decisions = [*seen.decisions[1 - MOST_ATTEMPTS :], decision]
        self._bytes += len(seen.hashes)
        seen.instance = decision.chosen.instance

    def _end(self, outcome: Outcome, now: float) -> None:
        seen = self._seen(base_id(outcome.request), outcome.time - outcome.total_s)
        if outcome.choice == 0:
            seen.outcomes = [outcome, *(o for o in seen.outcomes if o.choice)]
        elif len(seen.outcomes) < MOST_ATTEMPTS:
            seen.outcomes = [*seen.outcomes, outcome]
        seen.state = "ended"
        seen.generated = max(seen.generated, outcome.output_tokens)
        self._running.pop(seen.request, None)

    def _expire(self, now: float) -> None:
        requests = self._requests
        while requests and (
            len(requests) > MOST_REQUESTS
            or self._bytes > self._most_bytes
            or now - next(iter(requests.values())).arrived > self._window_s
        ):
            request, seen = requests.popitem(last=False)
            self._bytes -= REQUEST_BYTES + len(seen.hashes)
            self._running.pop(request, None)


def _client_named(seen: SeenRequest, name: str) -> bool:
    return any(outcome.client == name for outcome in seen.outcomes)
