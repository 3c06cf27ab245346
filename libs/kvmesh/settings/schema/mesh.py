"""Settings that all processes share: NATS, streams, logs, tracing and the process itself."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import (
    LOOPBACK,
    Count,
    Seconds,
    Secret,
    Section,
    Share,
    Url,
    Weight,
)


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


class NatsSettings(Section, frozen=True, kw_only=True):
    """
    url: NATS servers, separated by commas; empty starts one within `up`
    namespace: name of this mesh on the bus
    user: user name
    password: password
    token: authentication token
    credentials: path of a .creds file
    nkey_seed: seed of the nkey that identifies this process
    tls_ca: PEM file of the CA that signed the servers' certificates
    tls_cert: PEM file of this process's certificate, for mutual TLS
    tls_key: PEM file of that certificate's key
    tls_handshake_first: begin with the TLS handshake, as servers with handshake_first do
    domain: JetStream domain that holds the mesh, if it is not the server's own
    api_prefix: prefix of the JetStream API in place of that of nats.domain
    inbox_prefix: prefix of the subjects on which this process receives replies
    replicas: copies of each stream

    Tuning:
    bucket_bytes: largest size of each bucket, where the account requires one; 64 MiB of those in
        memory
    """

    url: Url = ""
    namespace: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]+$")] = "kvmesh"
    user: str | None = None
    password: Secret | None = None
    token: Secret | None = None
    credentials: str | None = None
    nkey_seed: Secret | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_handshake_first: bool = False
    domain: Annotated[str, Meta(pattern=r"^[^\s.*>]*$")] = ""
    api_prefix: Annotated[str, Meta(pattern=r"^[^\s*>]*$")] = ""
    inbox_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*$")] = "_INBOX"
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    bucket_bytes: Annotated[int, Meta(ge=1 << 20)] = 256 << 20


class StreamSettings(Section, frozen=True, kw_only=True):
    """
    kv_bytes: largest size of the KV event stream, in bytes
    route_bytes: largest size of the stream of routing decisions, in bytes
    models_bytes: largest size of the store of whole models, in bytes

    Tuning:
    kv_age_s: retention time of KV events
    route_age_s: retention time of routing decisions
    seq_bytes: largest size of the stream of active sequences, in bytes
    seq_age_s: retention time of active-sequence messages
    scaling_bytes: largest size of the stream of scaling decisions, in bytes
    scaling_age_s: retention time of scaling decisions
    lease_s: a process that does not renew its lease for this long is gone; the value of the first
        process holds for all until NATS restarts
    """

    kv_bytes: Annotated[int, Meta(ge=1 << 20)] = 4 << 30
    kv_age_s: Seconds = 86400.0
    route_bytes: Annotated[int, Meta(ge=1 << 20)] = 2 << 30
    route_age_s: Seconds = 86400.0
    seq_bytes: Annotated[int, Meta(ge=1 << 20)] = 64 << 20
    seq_age_s: Seconds = 3600.0
    scaling_bytes: Annotated[int, Meta(ge=1 << 20)] = 64 << 20
    scaling_age_s: Seconds = 30 * 86400.0
    models_bytes: Annotated[int, Meta(ge=1 << 20)] = 16 << 30
    lease_s: Annotated[float, Meta(ge=1)] = 10.0


class LogSettings(Section, frozen=True, kw_only=True):
    """
    level: lowest severity logged
    format: format of log lines
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class ProcessSettings(Section, frozen=True, kw_only=True):
    """
    metrics_host: address of each service's metrics-port, which needs no API key

    Tuning:
    hang_timeout_s: a service whose event loop is blocked for this long exits
    """

    metrics_host: str = LOOPBACK
    hang_timeout_s: Seconds = 30.0
