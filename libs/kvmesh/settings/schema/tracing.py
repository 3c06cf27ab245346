"""Settings of tracing, which all processes share."""

from typing import Literal

from kvmesh.settings.schema.common import Count, Seconds, Secret, Section, Share, Url, Weight


class TracingSettings(Section, frozen=True, kw_only=True):
    """
    endpoint: OTLP endpoint of a collector, such as `http://127.0.0.1:4317`; empty turns tracing
        off, unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set
    protocol: OTLP over gRPC, or over HTTP with protobuf; `auto`: `OTEL_EXPORTER_OTLP_PROTOCOL`,
        else gRPC
    headers: headers of each export: `name=value,name=value`
    sample_ratio: share of requests traced, unless their client has decided; absent:
        `OTEL_TRACES_SAMPLER`, else all
    client_context: continue the trace, and the sampling, of a client's `traceparent`
    tail: also trace unsampled requests that fail or take `slow_s` or longer

    Tuning:
    slow_s: duration from which a request is slow; 0: only failed ones
    queue: spans that wait to be sent; more drop the oldest
    timeout_s: time for one export, retries included
    """

    endpoint: Url = ""
    protocol: Literal["auto", "grpc", "http"] = "auto"
    headers: Secret | None = None
    sample_ratio: Share | None = None
    client_context: bool = True
    tail: bool = False
    slow_s: Weight = 30.0
    queue: Count = 4096
    timeout_s: Seconds = 10.0
