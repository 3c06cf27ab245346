"""Spans: plain records with times of the monotonic clock, without OpenTelemetry.

A process that does not record a trace works with `NO_SPAN`, whose methods do nothing.
"""

import re
from collections.abc import Callable
from random import getrandbits
from time import monotonic
from typing import Any, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["internal", "server", "client"]
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
MAX_EVENTS = 32


class TraceContext(NamedTuple):
    """A span of another process, as W3C's `traceparent` names it."""

    trace_id: str
    span_id: str
    sampled: bool


def parse_traceparent(text: str) -> TraceContext | None:
    """The context in a `traceparent`; None if it is malformed, which starts a new trace."""
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    # versions above 0 may append fields; ff is forbidden, as are ids of zeros
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) * int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def new_trace_id() -> str:
    return f"{getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    return f"{getrandbits(64) or 1:016x}"


class Trace:
    """One trace in this process. Spans that end are passed to `ended`.

    An unsampled trace is recorded as well if it may still be kept at its end (tail sampling).
    """

    __slots__ = ("ended", "id", "sampled", "state")

    def __init__(
        self, trace_id: str, sampled: bool, ended: "Callable[[TraceSpan], None]", state: str = ""
    ) -> None:
        self.id = trace_id
        self.sampled = sampled
        self.ended = ended
        self.state = state


class TraceSpan:
    """One span of a trace; `start` and `stop` are seconds of the monotonic clock."""

    __slots__ = (
        "attributes",
        "error",
        "events",
        "id",
        "kind",
        "links",
        "name",
        "parent_id",
        "start",
        "stop",
        "trace",
    )

    def __init__(
        self, trace: Trace, name: str, parent_id: str, start: float, kind: Kind = "internal"
    ) -> None:
        self.trace = trace
        self.name = name
        self.id = new_span_id()
        self.parent_id = parent_id
        self.kind = kind
        self.start = start
        self.stop: float | None = None
        self.attributes: dict[str, Any] = {}
        self.events: list[tuple[str, float]] = []
        self.links: list[TraceContext] = []
        self.error = ""

    def __bool__(self) -> bool:
        return True

    @property
    def traceparent(self) -> str:
        """The `traceparent` that continues the trace in another process; empty if untraced."""
        return f"00-{self.trace.id}-{self.id}-{'01' if self.trace.sampled else '00'}"

    @property
    def trace_id(self) -> str:
        return self.trace.id

    def child(self, name: str, start: float | None = None, kind: Kind = "internal") -> "TraceSpan":
        """A span within this one, from now or from `start` on."""
        return TraceSpan(self.trace, name, self.id, monotonic() if start is None else start, kind)

    def beside(self, name: str, start: float) -> "TraceSpan":
        """A span with the same parent as this one."""
        return TraceSpan(self.trace, name, self.parent_id, start)

    def record(
        self, name: str, start: float, stop: float, attributes: dict[str, Any] | None = None
    ) -> None:
        """Record a span within this one that is over."""
        child = TraceSpan(self.trace, name, self.id, start)
        if attributes is not None:
            child.attributes = attributes
        child.end(stop)

    def set(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def event(self, name: str, at: float) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append((name, at))

    def link(self, other: "TraceSpan") -> None:
        """Refer to a span of another trace."""
        if other:
            self.links.append(TraceContext(other.trace.id, other.id, other.trace.sampled))

    def fail(self, code: str) -> None:
        """Mark the span as failed, for the first reason given."""
        self.error = self.error or code

    def end(self, at: float | None = None) -> None:
        """End the span now, or at `at`; later calls do nothing."""
        if self.stop is None:
            self.stop = max(self.start, monotonic() if at is None else at)
            self.trace.ended(self)


class _NoSpan(TraceSpan):
    """The span of what is not traced."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(Trace("", False, lambda _: None), "", "", 0.0)

    def __bool__(self) -> bool:
        return False

    @property
    def traceparent(self) -> str:
        return ""

    def child(self, name: str, start: float | None = None, kind: Kind = "internal") -> TraceSpan:
        return self

    def beside(self, name: str, start: float) -> TraceSpan:
        return self

    def record(
        self, name: str, start: float, stop: float, attributes: dict[str, Any] | None = None
    ) -> None:
        return

    def set(self, key: str, value: Any) -> None:
        return

    def event(self, name: str, at: float) -> None:
        return

    def link(self, other: TraceSpan) -> None:
        return

    def fail(self, code: str) -> None:
        return

    def end(self, at: float | None = None) -> None:
        return


NO_SPAN: TraceSpan = _NoSpan()
