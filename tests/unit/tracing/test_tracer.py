"""Head and tail sampling, and the trace id in logs."""

import logging
from collections.abc import Iterator

import pytest

from kvmesh.runtime.logs import JsonFormatter, TextFormatter
from kvmesh.tracing import tracer
from kvmesh.tracing.span import NO_SPAN, TraceContext, TraceSpan
from kvmesh.tracing.tail import KeepRate, TailBuffer
from kvmesh.tracing.tracer import Tracer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


class Exported:
    """An exporter that samples as the client did, and otherwise as `ratio` says."""

    def __init__(self, ratio: bool = False) -> None:
        self.spans: list[TraceSpan] = []
        self._ratio = ratio

    def samples(self, trace_id: str, parent: TraceContext | None) -> bool:
        return self._ratio if parent is None else parent.sampled

    def export(self, span: TraceSpan) -> None:
        self.spans.append(span)


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    yield
    tracer.install(None)


def with_tail(
    exported: Exported, kept: list[str], slow_s: float = 10.0, per_s: float = 10.0
) -> Tracer:
    return Tracer(exported, TailBuffer(100), KeepRate(per_s, 0.0), slow_s, kept.append)


def test_nothing_is_recorded_without_a_tracer() -> None:
    assert tracer.begin("request", SAMPLED, "", 0.0) is NO_SPAN
    assert tracer.continued(SAMPLED, "place") is NO_SPAN
    tracer.finish(NO_SPAN)


def test_a_client_decides_over_its_trace() -> None:
    exported = Exported(ratio=True)
    tracer.install(Tracer(exported))
    assert tracer.begin("request", UNSAMPLED, "", 0.0) is NO_SPAN
    span = tracer.begin("request", SAMPLED, "vendor=1", 0.0)
    assert (span.trace.id, span.parent_id, span.trace.state) == (TRACE, SPAN, "vendor=1")
    assert span.child("route").traceparent.endswith("-01")
    tracer.finish(span)
    assert exported.spans == [span]


def test_a_client_is_ignored_where_it_is_not_trusted() -> None:
    tracer.install(Tracer(Exported(ratio=True), trusts_clients=False))
    span = tracer.begin("request", UNSAMPLED, "vendor=1", 0.0)
    assert span.trace.id != TRACE
    assert (span.parent_id, span.trace.state) == ("", "")


def test_a_malformed_context_begins_a_trace() -> None:
    tracer.install(Tracer(Exported(ratio=True)))
    span = tracer.begin("request", "nonsense", "vendor=1", 0.0)
    assert span
    assert (span.parent_id, span.trace.state) == ("", "")


def test_a_process_continues_sampled_traces_only() -> None:
    tracer.install(Tracer(Exported()))
    assert tracer.continued(UNSAMPLED, "place") is NO_SPAN
    assert tracer.continued("nonsense", "place") is NO_SPAN
    assert tracer.continued(SAMPLED, "place").parent_id == SPAN


@pytest.mark.parametrize(("error", "seconds"), [("internal", 1.0), ("", 10.0)])
def test_failed_and_slow_requests_are_kept(error: str, seconds: float) -> None:
    exported, kept = Exported(), list[str]()
    tracing = with_tail(exported, kept)
    span = tracing.begin("request", "", "", 0.0)
    early, late = span.child("route", 0.1), span.child("hook", 0.5)
    early.end(0.2)
    span.fail(error)
    assert exported.spans == []
    tracing.finish(span, seconds)
    assert exported.spans == [early, span]
    assert kept == [span.trace.id]
    late.end(seconds + 1)
    assert exported.spans == [early, span, late]


def test_other_requests_are_dropped() -> None:
    exported, kept, tail = Exported(), list[str](), TailBuffer(100)
    tracing = Tracer(exported, tail, KeepRate(10.0, 0.0), 10.0, kept.append)
    span = tracing.begin("request", "", "", 0.0)
    span.child("route", 0.1).end(0.2)
    tracing.finish(span, 9.0)
    assert (exported.spans, kept, len(tail)) == ([], [], 0)


def test_no_more_traces_are_kept_than_the_rate_allows() -> None:
    kept: list[str] = []
    tracing = with_tail(Exported(), kept, slow_s=1.0, per_s=2.0)
    for _ in range(5):
        tracing.finish(tracing.begin("request", "", "", 0.0), 1.0)
    assert len(kept) == 2
    tracing.finish(tracing.begin("request", "", "", 0.0), 1.5)
    assert len(kept) == 3


def test_a_process_exports_its_spans_of_a_trace_that_a_frontend_keeps() -> None:
    exported = Exported()
    worker = with_tail(exported, [])
    prefill = worker.continued(UNSAMPLED, "engine_prefill", 1.0)
    prefill.end(2.0)
    other = worker.continued(f"00-{'1' * 32}-{SPAN}-00", "engine_prefill", 1.0)
    other.end(2.0)
    worker.keep(TRACE)
    assert exported.spans == [prefill]


def test_the_oldest_traces_make_room() -> None:
    tail = TailBuffer(3)
    tracing = Tracer(exported := Exported(), tail)
    for number in (1, 2, 3):
        for _ in range(2):
            tracing.continued(f"00-{number:032x}-{SPAN}-00", "place", 1.0).end(2.0)
    assert len(tail) == 2
    tracing.keep(f"{1:032x}")
    tracing.keep(f"{3:032x}")
    assert len(exported.spans) == 2
    assert len(tail) == 0


def test_a_cause_is_linked_and_unsampled_causes_have_no_sequel() -> None:
    tracer.install(with_tail(Exported(), []))
    cause = tracer.begin("request", SAMPLED, "", 0.0)
    follows = tracer.linked(cause, "speculative_prefill")
    assert follows.trace.id != cause.trace.id
    assert follows.links == [TraceContext(TRACE, cause.id, True)]
    assert tracer.linked(tracer.begin("request", UNSAMPLED, "", 0.0), "x") is NO_SPAN


def test_what_is_rare_is_never_sampled_out() -> None:
    exported = Exported(ratio=False)
    assert tracer.kept("start", 1.0) is NO_SPAN, "no tracer is installed"
    tracer.install(Tracer(exported))
    span = tracer.kept("start", 1.0)
    span.record("start_weights", 2.0, 3.0)
    span.end(4.0)
    assert [each.name for each in exported.spans] == ["start_weights", "start"]


def test_log_lines_carry_the_trace_id() -> None:
    tracer.install(Tracer(Exported()))
    span = tracer.begin("request", SAMPLED, "", 0.0)
    record = logging.LogRecord("k", logging.WARNING, "", 0, "late", (), None)
    with tracer.logged_as(span):
        assert TextFormatter("router").format(record).endswith(f"late trace_id={TRACE}")
        assert f'"trace_id": "{TRACE}"' in JsonFormatter("router").format(record)
    with tracer.logged_as(NO_SPAN):
        assert "trace_id" not in TextFormatter("router").format(record)
        assert "trace_id" not in JsonFormatter("router").format(record)
