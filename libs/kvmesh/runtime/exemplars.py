"""Exemplars of histograms: the trace of the request behind an observation."""

from collections.abc import Callable

TraceId = Callable[[], str | None]
_current: TraceId = lambda: None  # noqa: E731


def use_traces(current: TraceId) -> None:
    """Take exemplars from `current`: the id of the running request's sampled trace, or None."""
    global _current
    _current = current


def current_exemplar() -> dict[str, str] | None:
    """Labels of the exemplar for an observation made now; None without a trace."""
    trace = _current()
    return None if trace is None else {"trace_id": trace}
