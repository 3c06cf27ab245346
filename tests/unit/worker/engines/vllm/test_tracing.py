"""Arguments and headers by which vLLM's spans join a trace."""

import os

import pytest

from kvmesh.bus.messages import Sampling, Work
from kvmesh.settings.schema import TracingSettings
from kvmesh.tracing.span import TraceContext, parse_traceparent
from kvmesh.worker.engines.vllm.tracing import ENDPOINT, trace_headers, tracing_arguments

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PREFIX = "OTEL_EXPORTER_OTLP_TRACES"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name in ("PROTOCOL", "HEADERS"):  # what the code sets is removed at the end
        monkeypatch.setenv(f"{PREFIX}_{name}", "")
        monkeypatch.delenv(f"{PREFIX}_{name}")


def work(traceparent: str) -> Work:
    sampling = Sampling(max_tokens=1)
    return Work(request="r", frontend="f", tokens=b"", sampling=sampling, traceparent=traceparent)


def test_vllm_sends_its_spans_to_the_collector_of_the_mesh() -> None:
    settings = TracingSettings(endpoint="http://c:4318", protocol="http", headers="key=secret")
    assert tracing_arguments(settings) == {ENDPOINT: "http://c:4318/v1/traces"}
    assert os.environ[f"{PREFIX}_PROTOCOL"] == "http/protobuf"
    assert os.environ[f"{PREFIX}_HEADERS"] == "key=secret"


def test_vllm_sends_over_grpc_too() -> None:
    assert tracing_arguments(TracingSettings(endpoint="http://c:4317")) == {
        ENDPOINT: "http://c:4317"
    }
    assert os.environ[f"{PREFIX}_PROTOCOL"] == "grpc"


def test_vllm_does_not_trace_without_a_collector() -> None:
    assert tracing_arguments(TracingSettings()) == {}


def test_a_traced_request_continues_its_trace() -> None:
    assert trace_headers(work(PARENT)) == {"traceparent": PARENT}


def test_an_untraced_request_is_unsampled_in_vllm() -> None:
    found = parse_traceparent(trace_headers(work(""))["traceparent"])
    assert isinstance(found, TraceContext)
    assert not found.sampled
