"""Settings of tracing, which all processes share."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Seconds, Secret, Section, Url


class TracingSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "slow_s queue timeout_s"
    endpoint: Annotated[
        Url,
        Meta(
            description="OTLP endpoint of a collector, such as `http://127.0.0.1:4317`; empty turns"
            " tracing off, unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set"
        ),
    ] = ""
    protocol: Annotated[
        Literal["auto", "grpc", "http"],
        Meta(
            description="OTLP over gRPC, or over HTTP with protobuf; `auto`:"
            " `OTEL_EXPORTER_OTLP_PROTOCOL`, else gRPC"
        ),
    ] = "auto"
    headers: Annotated[
        Secret | None,
        Meta(description="headers of each export: `name=value,name=value`"),
    ] = None
    sample_ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="share of requests traced, unless their client has decided; absent:"
            " `OTEL_TRACES_SAMPLER`, else all",
        ),
    ] = None
    client_context: Annotated[
        bool, Meta(description="continue the trace, and the sampling, of a client's `traceparent`")
    ] = True
    tail: Annotated[
        bool,
        Meta(description="also trace unsampled requests that fail or take `slow_s` or longer"),
    ] = False
    slow_s: Annotated[
        float,
        Meta(ge=0, description="duration from which a request is slow; 0: only failed ones"),
    ] = 30.0
    queue: Annotated[
        Count, Meta(description="spans that wait to be sent; more drop the oldest")
    ] = 4096
    timeout_s: Annotated[Seconds, Meta(description="time for one export, retries included")] = 10.0
