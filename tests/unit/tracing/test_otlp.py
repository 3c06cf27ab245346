"""Spans as the SDK exports them, and the choice of the collector."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan
from support.wait import PATIENCE_S

from kvmesh.settings.schema import TracingSettings
from kvmesh.tracing import names
from kvmesh.tracing.endpoint import HTTP, endpoint, protocol, traces_url, turned_on
from kvmesh.tracing.otlp import OtlpExport
from kvmesh.tracing.span import Trace, TraceContext, TraceSpan

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SERVICE_NAME",
        "TRACES_SAMPLER",
        "TRACES_SAMPLER_ARG",
        "SEMCONV_STABILITY_OPT_IN",
    ):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[ReadableSpan]:
    spans: list[ReadableSpan] = []
    monkeypatch.setattr(
        "kvmesh.tracing.otlp.BatchSpanProcessor.on_end", lambda _, span: spans.append(span)
    )
    return spans


@pytest.fixture
def exports() -> Iterator[Any]:
    made: list[OtlpExport] = []

    def make(**fields: Any) -> OtlpExport:
        settings = TracingSettings(endpoint=NOWHERE, protocol="http", timeout_s=0.5, **fields)
        made.append(OtlpExport(settings, "kvmesh-router", "router-0-1", "1.0"))
        return made[-1]

    yield make
    for export in made:
        export.close(PATIENCE_S)  # its thread calls `random`, which later tests must not see


def request_span() -> TraceSpan:
    span = TraceSpan(
        Trace(TRACE, True, lambda _: None, "vendor=1"), names.REQUEST, SPAN, 5.0, "server"
    )
    span.attributes = {names.OPERATION: "chat", names.MODEL: "m", names.TIERS: [1, 2]}
    span.event(names.FIRST_TOKEN, 5.5)
    span.links.append(TraceContext(TRACE, SPAN, True))
    span.fail("internal")
    span.stop = 6.0
    return span


def test_a_span_is_exported_with_all_that_it_has(
    exports: Any, received: list[ReadableSpan]
) -> None:
    span = request_span()
    exports().export(span)
    (sent,) = received
    assert sent.name == names.REQUEST
    assert f"{sent.context.trace_id:032x}" == TRACE
    assert sent.context.trace_state.get("vendor") == "1"
    assert sent.parent is not None
    assert f"{sent.parent.span_id:016x}" == SPAN
    assert sent.start_time is not None
    assert sent.end_time is not None
    assert sent.end_time - sent.start_time == 1_000_000_000
    assert dict(sent.attributes or {}) == span.attributes
    assert [(e.name, e.timestamp - sent.start_time) for e in sent.events] == [
        (names.FIRST_TOKEN, 500_000_000)
    ]
    assert len(sent.links) == 1
    assert sent.status.description == "internal"
    assert sent.resource.attributes["service.name"] == "kvmesh-router"
    assert sent.resource.attributes["service.instance.id"] == "router-0-1"


def test_the_conventions_names_need_the_opt_in(
    exports: Any, received: list[ReadableSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", f"http, {names.OPT_IN}")
    exports().export(request_span())
    (sent,) = received
    assert sent.name == "chat m"
    assert dict(sent.attributes or {}) == {
        names.PROVIDER: "kvmesh",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        names.TIERS: [1, 2],
    }


def test_the_variables_of_the_sdk_count(
    exports: Any, received: list[ReadableSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    export = exports()
    export.export(request_span())
    assert received[0].resource.attributes["service.name"] == "ours"
    assert not export.samples(TRACE, None)
    assert export.samples(TRACE, TraceContext(TRACE, SPAN, True))
    assert exports(sample_ratio=1.0).samples(TRACE, None)


def test_the_ratio_is_that_of_new_traces(exports: Any) -> None:
    export = exports(sample_ratio=0.25)
    low, high = "0" * 31 + "1", "f" * 32
    assert export.samples(low, None)
    assert not export.samples(high, None)
    assert export.samples(high, TraceContext(high, SPAN, True))
    assert not export.samples(low, TraceContext(low, SPAN, False))


def test_the_collector_is_that_of_the_settings_or_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    none, ours = TracingSettings(), TracingSettings(endpoint="http://here:4317")
    assert not turned_on(none)
    assert turned_on(ours)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://there:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert turned_on(none)
    assert (endpoint(none), protocol(none)) == ("http://there:4318", HTTP)
    assert endpoint(ours) == "http://here:4317"
    assert traces_url("http://there:4318/") == "http://there:4318/v1/traces"
    assert traces_url("http://there/v1/traces") == "http://there/v1/traces"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not turned_on(none)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not turned_on(ours)


class Received(TraceServiceServicer):
    """A collector over gRPC."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.headers: dict[str, str] = {}

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.headers = dict(context.invocation_metadata())
        for resource in request.resource_spans:
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


def test_spans_are_sent_over_grpc() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    received = Received()
    add_TraceServiceServicer_to_server(received, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    url = f"http://127.0.0.1:{port}"
    settings = TracingSettings(endpoint=url, protocol="grpc", headers="x-key=secret")
    export = OtlpExport(settings, "kvmesh-router", "router-0-1", "1.0")
    export.export(request_span())
    export.close(PATIENCE_S)
    server.stop(None)
    assert received.names == [names.REQUEST]
    assert received.headers["x-key"] == "secret"


def test_a_full_queue_is_logged(exports: Any, caplog: pytest.LogCaptureFixture) -> None:
    export = exports(queue=1)
    for _ in range(50):
        export.export(request_span())
    assert "spans are lost: Queue full" in caplog.text


def test_services_import_no_sdk_unless_tracing_is_on() -> None:
    code = (
        "import sys, kvmesh.frontend.service, kvmesh.router.service, kvmesh.worker.service;"
        "import kvmesh.kvbm.service, kvmesh.indexer.service;"
        "print([m for m in sys.modules if m.startswith('opentelemetry') or m == 'grpc'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
