"""Tail sampling: spans of unsampled traces, held until their request has ended. Pure."""

from collections import OrderedDict
from threading import Lock

from kvmesh.tracing.span import TraceSpan

MAX_KEPT = 4096  # traces whose later spans are kept as well


class TailBuffer:
    """At most `capacity` spans of unsampled traces; the oldest trace is dropped first.

    May be used from any thread.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._traces: OrderedDict[str, list[TraceSpan]] = OrderedDict()
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return self._size

    def add(self, span: TraceSpan) -> bool:
        """Hold a span that has ended; False if its trace is kept already: export it now."""
        trace_id = span.trace.id
        with self._lock:
            if trace_id in self._kept:
                return False
            self._traces.setdefault(trace_id, []).append(span)
            self._size += 1
            while self._size > self._capacity:
                _, dropped = self._traces.popitem(last=False)
                self._size -= len(dropped)
        return True

    def keep(self, trace_id: str) -> list[TraceSpan]:
        """The spans of a trace that is kept; from now on `add` refuses those that follow."""
        with self._lock:
            self._kept[trace_id] = None
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            spans = self._traces.pop(trace_id, [])
            self._size -= len(spans)
        return spans

    def drop(self, trace_id: str) -> None:
        """Drop the spans of a trace that is not kept."""
        with self._lock:
            self._size -= len(self._traces.pop(trace_id, ()))


class KeepRate:
    """Bound of the traces kept per second: a token bucket of one second."""

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._tokens = max(per_s, 1.0)
        self._at = now

    def allow(self, now: float) -> bool:
        """True if one more trace may be kept at `now`."""
        self._tokens = min(max(self._per_s, 1.0), self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
