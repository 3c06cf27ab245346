"""The latest requests: placements, progress while they run, outcomes. Pure."""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec.structs import replace

from kvmesh.bus.messages import (
    Decision,
    Outcome,
    RouteEvent,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqProgress,
    SeqWait,
)
from kvmesh.dashboard.state.clocks import plausible
from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.dashboard.state.sessions import SessionLanes
from kvmesh.observer.prefetch_uses import base_id

MOST_REQUESTS = 20_000
MOST_ENDED = 1_000  # of those listed as the latest
REQUEST_BYTES = 6500  # of a request beside its hashes, measured with eight candidates
OBJECT_BYTES = 4  # that objects take for a byte of a message
MOST_ATTEMPTS = 8  # the last ones are kept
SILENT_S = 185.0  # a frontend reports each sequence every 60 s
PREFILL_MARK = "#prefill"
PREFETCH_ID = "pf_"


class RequestLog:
    """The requests of the last `window_s` seconds, the oldest of them dropped at a bound.

    The bounds are MOST_REQUESTS and `most_bytes` of memory. Those that run stay until they end,
    however long that takes. Prefetches do not count. `now` is in Unix seconds.
    """

    def __init__(self, window_s: float, most_bytes: int) -> None:
        self._window_s = window_s
        self._most_bytes = most_bytes
        self._bytes = 0
        self._requests: OrderedDict[str, SeenRequest] = OrderedDict()
        self._running: OrderedDict[str, SeenRequest] = OrderedDict()
        self._ended: OrderedDict[str, SeenRequest] = OrderedDict()
        self.lanes = SessionLanes()

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request: str) -> SeenRequest | None:
        """A request by its id; also by that of one of its attempts, or the client's own id."""
        found = self._requests.get(request) or self._requests.get(base_id(request))
        return found or next((r for r in self.latest() if _client_named(r, request)), None)

    def latest(self) -> Iterator[SeenRequest]:
        """All requests, the one that started, was placed or ended last first."""
        return reversed(self._requests.values())

    def ended(self) -> Iterator[SeenRequest]:
        """The latest MOST_ENDED requests that have ended, the last one first."""
        return reversed(self._ended.values())

    def running(self, now: float) -> list[SeenRequest]:
        """The requests that wait or run, in the order in which they began to.

        One whose frontend has been silent for SILENT_S seconds has ended with its frontend.
        """
        for seen in [r for r in self._running.values() if r.alive_until < now]:
            self._leave(seen)
        return list(self._running.values())

    def add_route(self, event: RouteEvent, now: float, size: int = 0) -> None:
        """Add a decision or an outcome; `size` is that of its message in bytes."""
        if isinstance(event, Outcome):
            self._end(event, now)
        elif event.prefetch is None:
            self._place(event, now)
        self._weigh(event, size)
        self._expire(now)

    def add_sequence(self, event: SeqEvent, now: float) -> None:
        """Follow the progress of a sequence; the part of a request on a prefill worker is ignored.

        Events of earlier attempts, and of requests that have ended, come late and change nothing.
        """
        if event.request.endswith(PREFILL_MARK) or event.request.startswith(PREFETCH_ID):
            return
        if isinstance(event, SeqWait | SeqAdd):
            self._start(event, now)
            self._expire(now)
            return
        seen = self._requests.get(base_id(event.request))
        if seen is None or not _is_current(seen, event.request):
            return
        if isinstance(event, SeqFree):
            seen.sequence = event.request
            self._leave(seen)
            return
        self._run(seen, event.request, now)  # it may have started before this process
        if isinstance(event, SeqProgress):
            seen.generated = max(seen.generated, event.generated)
        if isinstance(event, SeqPrefilled) or seen.generated:
            seen.state = "decode"
        elif seen.state != "decode":
            seen.state = "prefill"

    def _start(self, event: SeqWait | SeqAdd, now: float) -> None:
        arrived = event.arrived if isinstance(event, SeqWait) else event.time
        seen = self._seen(base_id(event.request), arrived, now)
        if not _is_current(seen, event.request):
            return
        repeated = seen.sequence == event.request
        if isinstance(event, SeqAdd) and not event.waits_for:
            if repeated and seen.state in ("decode", "left"):
                return
            seen.state, seen.instance = "prefill", event.instance
            self._run(seen, event.request, now)
        elif not repeated or seen.state == "waiting":
            seen.state = "waiting"
            self._run(seen, event.request, now)
            if isinstance(event, SeqWait):
                seen.alive_until = max(seen.alive_until, plausible(event.deadline, now))

    def _run(self, seen: SeenRequest, sequence: str, now: float) -> None:
        seen.sequence, seen.alive_until = sequence, now + SILENT_S
        self._running[seen.request] = seen

    def _leave(self, seen: SeenRequest) -> None:
        if seen.state != "ended":
            seen.state = "left"
        self._running.pop(seen.request, None)

    def _seen(self, request: str, arrived: float, now: float) -> SeenRequest:
        seen = self._requests.get(request)
        if seen is None:
            # the clock of another machine may be ahead
            seen = self._requests[request] = SeenRequest(request, min(plausible(arrived, now), now))
            self._bytes += _bytes(seen)
        self._requests.move_to_end(request)
        seen.seen_at = now
        return seen

    def _place(self, decision: Decision, now: float) -> None:
        seen = self._seen(base_id(decision.request), decision.time - decision.wait_s, now)
        self._bytes -= _bytes(seen)
        others = [each for each in seen.decisions if each.request != decision.request]
        ordered = sorted([*others, decision], key=lambda each: _attempt(each.request))
        seen.decisions = ordered[-MOST_ATTEMPTS:]
        self._bytes += _bytes(seen)
        if seen.outcome is None:
            seen.instance = seen.decisions[-1].chosen.instance
            self.lanes.add(seen)

    def _end(self, outcome: Outcome, now: float) -> None:
        seen = self._seen(base_id(outcome.request), outcome.time - outcome.total_s, now)
        if outcome.choice or seen.scoped_session != outcome.session:
            self.lanes.remove(seen)
        if (ended := plausible(outcome.time, now)) != outcome.time:
            outcome = replace(outcome, time=ended)
        seen.outcome, seen.state = outcome, "ended"
        seen.instance = outcome.instance or seen.instance
        seen.generated = max(seen.generated, outcome.output_tokens)
        self._running.pop(seen.request, None)
        self._ended[seen.request] = seen
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)
        if not outcome.choice:
            self.lanes.add(seen)

    def _weigh(self, event: RouteEvent, size: int) -> None:
        """Count the memory of an event that is larger than others, as by a thousand candidates."""
        hashes = 0 if isinstance(event, Outcome) else len(event.sequence_hashes)
        beyond = OBJECT_BYTES * (size - hashes) - REQUEST_BYTES
        if beyond > 0 and (seen := self._requests.get(base_id(event.request))) is not None:
            seen.bytes_beyond += beyond
            self._bytes += beyond

    def _expire(self, now: float) -> None:
        requests = self._requests
        while requests:
            oldest = next(iter(requests.values()))
            full = len(requests) > MOST_REQUESTS or self._bytes > self._most_bytes
            if not full and now - oldest.seen_at <= self._window_s:
                return
            if not full and oldest.request in self._running and oldest.alive_until >= now:
                requests.move_to_end(oldest.request)
                oldest.seen_at = now
            else:
                self._forget(oldest)

    def _forget(self, seen: SeenRequest) -> None:
        del self._requests[seen.request]
        self._bytes -= _bytes(seen)
        self._running.pop(seen.request, None)
        self._ended.pop(seen.request, None)
        self.lanes.remove(seen)


def _bytes(seen: SeenRequest) -> int:
    hashes = sum(len(decision.sequence_hashes) for decision in seen.decisions)
    return REQUEST_BYTES + hashes + seen.bytes_beyond


def _is_current(seen: SeenRequest, sequence: str) -> bool:
    """True unless the event of a sequence comes after the request's end, or a later attempt."""
    return seen.state != "ended" and _attempt(sequence) >= _attempt(seen.sequence)


def _attempt(sequence: str) -> int:
    """The number of an attempt, 0 for the first one."""
    number = sequence[len(base_id(sequence)) + 1 :]
    return int(number) if number.isdecimal() and len(number) < 10 else 0


def _client_named(seen: SeenRequest, name: str) -> bool:
    return seen.outcome is not None and seen.outcome.client == name
