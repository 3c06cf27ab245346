"""The spans of a routing request in the router; without a trace each call costs one test."""

from time import monotonic

from kvmesh.bus.messages import Decision, Refused
from kvmesh.tracing import names
from kvmesh.tracing.span import NO_SPAN, TraceSpan
from kvmesh.tracing.tracer import continued


class PlacementTrace:
    """The span of one routing request, with those of its index query and of its wait."""

    __slots__ = ("_index", "_span", "_waits_from")

    def __init__(self, span: TraceSpan) -> None:
        self._span = span
        self._index: TraceSpan = NO_SPAN
        self._waits_from: float | None = None

    def query(self) -> str:
        """Begin the span of the index query; returns its `traceparent`."""
        self._index = self._span.child(names.INDEX, kind="client")
        return self._index.traceparent

    def found(self, failure: str | None) -> None:
        """The index has replied, or failed."""
        if failure is not None:
            self._index.fail("unavailable")
        self._index.end()

    def waits(self, since: float) -> None:
        """The request waits in the queue from now on."""
        if self._waits_from is None:
            self._waits_from = since

    def end(self, result: Decision | Refused | None, status: str = "") -> None:
        """The request leaves the router with a result, or for the reason in `status`."""
        span, now = self._span, monotonic()
        if self._waits_from is not None:
            span.record(names.QUEUE, self._waits_from, now)
        self._index.end(now)
        if isinstance(result, Decision):
            chosen = result.chosen
            span.attributes |= {
                names.STATUS: "routed",
                names.ATTEMPT_ID: result.request,
                names.POLICY: result.policy,
                names.INSTANCE: chosen.instance,
                names.RANK: chosen.rank,
                names.OVERLAP: chosen.overlap,
                names.ELIGIBLE: result.eligible,
            }
        elif result is not None:
            span.set(names.STATUS, result.code)
        else:
            span.set(names.STATUS, status)
        span.end(now)


def placement_trace(traceparent: str, started: float) -> PlacementTrace | None:
    """The trace of a routing request; None if it is not traced."""
    span = continued(traceparent, names.PLACE, started)
    return PlacementTrace(span) if span else None
