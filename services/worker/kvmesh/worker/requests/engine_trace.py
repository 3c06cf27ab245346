"""The spans of a sequence in its engine, recorded at the end of each phase.

Each is a child of the attempt's span in the frontend, not of a span of this process: a worker that
is killed then leaves no span without a parent.
"""

from time import monotonic

from kvmesh.bus.messages import Work
from kvmesh.tracing import names
from kvmesh.tracing.span import TraceSpan
from kvmesh.tracing.tracer import continued
from kvmesh.worker.engine import OutputDelta


class EngineTrace:
    """One sequence, from its acceptance on; times are those of the monotonic clock."""

    __slots__ = ("_accepted", "_first", "_phase", "_takes_over", "_tokens")

    def __init__(self, phase: TraceSpan, work: Work) -> None:
        self._phase = phase
        self._accepted = phase.start
        self._takes_over = work.handoff is not None
        self._first: float | None = None
        self._tokens = 0

    def add(self, delta: OutputDelta) -> None:
        """Record the phases that end with this output."""
        self._tokens += len(delta.tokens)
        if self._first is None and (delta.tokens or delta.finish is not None):
            self._end_prefill(delta, monotonic())
        if delta.finish is not None:
            phase = self._phase
            phase.set(names.STATUS, delta.finish or "")
            phase.set(names.OUTPUT_TOKENS, self._tokens)
            if delta.error is not None:
                phase.fail(delta.finish or "error")
            phase.end()

    def abandon(self) -> None:
        """The sequence is dropped without an end."""
        self._phase.fail("abandoned")
        self._phase.end()

    def _end_prefill(self, delta: OutputDelta, now: float) -> None:
        prefill, begun = self._phase, self._accepted
        if delta.admitted_at is not None:
            begun = min(max(delta.admitted_at, begun), now)
            prefill.beside(names.ENGINE_QUEUE, self._accepted).end(begun)
        if delta.loaded_at is not None and delta.loaded_at > begun:
            loaded = min(delta.loaded_at, now)
            kind = names.HANDOFF if self._takes_over else names.ONBOARD
            prefill.beside(kind, begun).end(loaded)
            begun = loaded
        prefill.start = begun
        if delta.cached is not None:
            prefill.set(names.TIERS, delta.cached)
        if delta.tokens:
            prefill.end(now)
            self._phase = prefill.beside(names.ENGINE_DECODE, now)
        self._first = now


def engine_trace(work: Work) -> EngineTrace | None:
    """The trace of work that this worker has just accepted; None if it is not traced."""
    span = continued(work.traceparent, names.ENGINE_PREFILL)
    return EngineTrace(span, work) if span else None
