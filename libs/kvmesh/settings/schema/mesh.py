"""Settings that all processes share: NATS, streams, log and process."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import LOOPBACK, Seconds, Secret, Section, Url


class NatsSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "bucket_bytes"
    url: Annotated[
        Url, Meta(description="NATS servers, separated by commas; empty starts one within `up`")
    ] = ""
    namespace: Annotated[
        str, Meta(pattern="^[A-Za-z0-9_-]+$", description="name of this mesh on the bus")
    ] = "kvmesh"
    user: Annotated[str | None, Meta(description="user name")] = None
    password: Annotated[Secret | None, Meta(description="password")] = None
    token: Annotated[Secret | None, Meta(description="authentication token")] = None
    credentials: Annotated[str | None, Meta(description="path of a .creds file")] = None
    nkey_seed: Annotated[
        Secret | None, Meta(description="seed of the nkey that identifies this process")
    ] = None
    tls_ca: Annotated[
        Path | None,
        Meta(description="PEM file of the CA that signed the servers' certificates"),
    ] = None
    tls_cert: Annotated[
        Path | None, Meta(description="PEM file of this process's certificate, for mutual TLS")
    ] = None
    tls_key: Annotated[Path | None, Meta(description="PEM file of that certificate's key")] = None
    tls_handshake_first: Annotated[
        bool, Meta(description="begin with the TLS handshake, as servers with handshake_first do")
    ] = False
    domain: Annotated[
        str,
        Meta(
            pattern=r"^[^\s.*>]*$",
            description="JetStream domain that holds the mesh, if it is not the server's own",
        ),
    ] = ""
    api_prefix: Annotated[
        str,
        Meta(
            pattern=r"^[^\s*>]*$",
            description="prefix of the JetStream API in place of that of nats.domain",
        ),
    ] = ""
    inbox_prefix: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*$",
            description="prefix of the subjects on which this process receives replies",
        ),
    ] = "_INBOX"
    replicas: Annotated[int, Meta(ge=1, le=5, description="copies of each stream")] = 1
    bucket_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="largest size of each bucket, where the account requires one; 64 MiB of"
            " those in memory",
        ),
    ] = 256 << 20


class StreamSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = (
        "kv_age_s route_age_s seq_bytes seq_age_s scaling_bytes scaling_age_s lease_s"
    )
    kv_bytes: Annotated[
        int, Meta(ge=1 << 20, description="largest size of the KV event stream, in bytes")
    ] = 4 << 30
    kv_age_s: Annotated[Seconds, Meta(description="retention time of KV events")] = 86400.0
    route_bytes: Annotated[
        int,
        Meta(ge=1 << 20, description="largest size of the stream of routing decisions, in bytes"),
    ] = 2 << 30
    route_age_s: Annotated[Seconds, Meta(description="retention time of routing decisions")] = (
        86400.0
    )
    seq_bytes: Annotated[
        int,
        Meta(ge=1 << 20, description="largest size of the stream of active sequences, in bytes"),
    ] = 64 << 20
    seq_age_s: Annotated[
        Seconds, Meta(description="retention time of active-sequence messages")
    ] = 3600.0
    scaling_bytes: Annotated[
        int,
        Meta(ge=1 << 20, description="largest size of the stream of scaling decisions, in bytes"),
    ] = 64 << 20
    scaling_age_s: Annotated[Seconds, Meta(description="retention time of scaling decisions")] = (
        30 * 86400.0
    )
    models_bytes: Annotated[
        int,
        Meta(ge=1 << 20, description="largest size of the store of whole models, in bytes"),
    ] = 16 << 30
    lease_s: Annotated[
        float,
        Meta(
            ge=1,
            description="a process that does not renew its lease for this long is gone; the value"
            " of the first process holds for all until NATS restarts",
        ),
    ] = 10.0


class LogSettings(Section, frozen=True, kw_only=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="lowest severity logged")
    ] = "info"
    format: Annotated[Literal["text", "json"], Meta(description="format of log lines")] = "text"


class ProcessSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "hang_timeout_s"
    metrics_host: Annotated[
        str, Meta(description="address of each service's metrics-port, which needs no API key")
    ] = LOOPBACK
    hang_timeout_s: Annotated[
        Seconds, Meta(description="a service whose event loop is blocked for this long exits")
    ] = 30.0
