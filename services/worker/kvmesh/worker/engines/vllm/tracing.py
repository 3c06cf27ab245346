"""Arguments and headers with which vLLM's own spans join the traces of the mesh."""

import os
from typing import Any

from kvmesh.bus.messages import Work
from kvmesh.settings.schema import TracingSettings
from kvmesh.tracing.endpoint import HTTP, endpoint, protocol, traces_url, turned_on
from kvmesh.tracing.span import new_span_id, new_trace_id

ENDPOINT = "otlp_traces_endpoint"


def tracing_arguments(settings: TracingSettings) -> dict[str, Any]:
    """Arguments of vLLM that send its spans to the collector of the mesh; empty without tracing.

    vLLM reads the protocol and the headers from the environment, which its processes inherit.
    """
    if not turned_on(settings):
        return {}
    chosen = protocol(settings)
    os.environ.setdefault(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf" if chosen == HTTP else "grpc"
    )
    export_headers(settings)
    url = endpoint(settings)
    return {ENDPOINT: traces_url(url) if chosen == HTTP else url}


def export_headers(settings: TracingSettings) -> None:
    """Export the headers of the collector to vLLM's processes, which log their arguments."""
    if settings.headers:
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_HEADERS", settings.headers)


def trace_headers(work: Work) -> dict[str, str]:
    """Headers of a request for a vLLM that traces.

    Without a `traceparent` vLLM begins a trace of its own, so untraced work gets an unsampled one.
    """
    return {"traceparent": work.traceparent or f"00-{new_trace_id()}-{new_span_id()}-00"}
