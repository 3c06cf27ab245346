"""The tracer of this process: starts spans, samples them, and passes them to an exporter.

Without an installed tracer every span is `NO_SPAN`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Protocol

from kvmesh.tracing.span import (
    NO_SPAN,
    Kind,
    Trace,
    TraceContext,
    TraceSpan,
    new_trace_id,
    parse_traceparent,
)
from kvmesh.tracing.tail import KeepRate, TailBuffer

current_trace_id: ContextVar[str] = ContextVar("kvmesh_trace_id", default="")


class SpanExporter(Protocol):
    """Destination of the spans of kept traces; neither call waits."""

    def samples(self, trace_id: str, parent: TraceContext | None) -> bool:
        """Head sampling: True if a trace that begins here is to be exported."""
        ...

    def export(self, span: TraceSpan) -> None:
        """Queue a span that has ended."""
        ...


class Tracer:
    """Head sampling by the exporter; tail sampling if there is a `tail`.

    A kept trace is passed to `announce`, so that other processes export their spans of it.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        tail: TailBuffer | None = None,
        rate: KeepRate | None = None,
        slow_s: float = 0.0,
        announce: Callable[[str], None] | None = None,
        trusts_clients: bool = True,
    ) -> None:
        self._exporter = exporter
        self._tail = tail
        self._rate = rate
        self._slow_s = slow_s
        self._announce = announce
        self._trusts_clients = trusts_clients

    def begin(self, name: str, traceparent: str, tracestate: str, start: float) -> TraceSpan:
        """The first span in the mesh of a request, with the context that its client sent."""
        parent = parse_traceparent(traceparent) if traceparent and self._trusts_clients else None
        trace_id = new_trace_id() if parent is None else parent.trace_id
        sampled = self._exporter.samples(trace_id, parent)
        if not sampled and self._tail is None:
            return NO_SPAN
        # an unsampled parent is never exported: a kept trace begins here
        parent_id = parent.span_id if parent is not None and parent.sampled else ""
        trace = Trace(trace_id, sampled, self._ended, tracestate if parent is not None else "")
        return TraceSpan(trace, name, parent_id, start, "server")

    def kept(self, name: str, start: float) -> TraceSpan:
        """The first span of a trace that is never sampled out, of something rare."""
        return TraceSpan(Trace(new_trace_id(), True, self._ended), name, "", start)

    def continued(
        self, traceparent: str, name: str, start: float, kind: Kind = "server"
    ) -> TraceSpan:
        """A span within one of another process, named by the `traceparent` in its message."""
        parent = parse_traceparent(traceparent)
        if parent is None or (not parent.sampled and self._tail is None):
            return NO_SPAN
        trace = Trace(parent.trace_id, parent.sampled, self._ended)
        return TraceSpan(trace, name, parent.span_id, start, kind)

    def linked(self, cause: TraceSpan, name: str, start: float) -> TraceSpan:
        """The first span of a new trace that is linked to `cause`, if that is sampled."""
        if not cause.trace.sampled:
            return NO_SPAN  # the decision to keep a trace at its end does not reach its sequels
        span = self.kept(name, start)
        span.link(cause)
        return span

    def finish(self, span: TraceSpan, now: float) -> None:
        """End the first span of a request; keep its trace if it failed or was slow."""
        span.end(now)
        if span.trace.sampled or self._tail is None:
            return
        worth = bool(span.error) or (0.0 < self._slow_s <= now - span.start)
        if worth and self._rate is not None and self._rate.allow(now):
            self.keep(span.trace.id)
            if self._announce is not None:
                self._announce(span.trace.id)
        else:
            self._tail.drop(span.trace.id)

    def keep(self, trace_id: str) -> None:
        """Export this process's spans of an unsampled trace, those that follow included."""
        if self._tail is not None:
            for span in self._tail.keep(trace_id):
                self._exporter.export(span)

    def _ended(self, span: TraceSpan) -> None:
        if span.trace.sampled or self._tail is None or not self._tail.add(span):
            self._exporter.export(span)


_tracer: Tracer | None = None


def install(tracer: Tracer | None) -> None:
    """Make `tracer` that of this process; None turns tracing off."""
    global _tracer
    _tracer = tracer


def is_installed() -> bool:
    """True if this process has a tracer."""
    return _tracer is not None


def begin(name: str, traceparent: str, tracestate: str, start: float) -> TraceSpan:
    """The first span of a request; see `Tracer.begin`."""
    return NO_SPAN if _tracer is None else _tracer.begin(name, traceparent, tracestate, start)


def kept(name: str, start: float) -> TraceSpan:
    """The first span of a trace of something rare; see `Tracer.kept`."""
    return NO_SPAN if _tracer is None else _tracer.kept(name, start)


def continued(traceparent: str, name: str, start: float | None = None) -> TraceSpan:
    """A span within one of another process; see `Tracer.continued`."""
    if not traceparent or _tracer is None:
        return NO_SPAN
    return _tracer.continued(traceparent, name, monotonic() if start is None else start)


def linked(cause: TraceSpan, name: str) -> TraceSpan:
    """The first span of a trace that follows from `cause`; see `Tracer.linked`."""
    return _tracer.linked(cause, name, monotonic()) if cause and _tracer is not None else NO_SPAN


def finish(span: TraceSpan) -> None:
    """End the first span of a request; see `Tracer.finish`."""
    if span and _tracer is not None:
        _tracer.finish(span, monotonic())


@contextmanager
def logged_as(span: TraceSpan) -> Iterator[None]:
    """Within this context, and in tasks that start in it, log lines carry the id of the trace."""
    if not span:
        yield
        return
    token = current_trace_id.set(span.trace_id)
    try:
        yield
    finally:
        current_trace_id.reset(token)
