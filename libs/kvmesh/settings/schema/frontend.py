"""Settings of the frontend."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kvmesh.settings.schema.common import (
    LOOPBACK,
    Count,
    MetricsHost,
    Port,
    Seconds,
    Secret,
    Section,
)


class FrontendSettings(Section, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port to listen on; 0 picks a free one")] = 8000
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    processes: Annotated[
        int, Meta(ge=1, le=256, description="frontend processes that share the port")
    ] = 1
    reuse_port: Annotated[bool, Meta(description="let other processes listen on the same port")] = (
        False
    )
    metrics_port: Annotated[
        Port, Meta(description="port of this process's own /metrics and /health; 0: none")
    ] = 0
    metrics_host: MetricsHost = LOOPBACK
    keys_file: Annotated[
        Path | None, Meta(description="TOML file of API keys; none: no key is asked for")
    ] = None
    keys_bucket: Annotated[bool, Meta(description="take API keys from the mesh's bucket")] = False
    allow_anonymous: Annotated[
        bool, Meta(description="listen beyond loopback without API keys")
    ] = False
    tenant_secret: Annotated[
        Secret | None,
        Meta(
            description="64 hexadecimal digits under which tenants are told apart; none: the mesh's"
        ),
    ] = None
    max_body_bytes: Annotated[Count, Meta(description="largest request body")] = 8 << 20
    max_in_flight: Annotated[
        Count, Meta(description="requests served at once; more are told to wait")
    ] = 4096
    route_timeout_s: Annotated[Seconds, Meta(description="longest wait for a placement")] = 60.0
    restart_wait_s: Annotated[
        Seconds, Meta(description="longest wait for a router or worker where none is running")
    ] = 5.0
    prefill_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for a prefill worker, before doing without")
    ] = 60.0
    stall_timeout_s: Annotated[
        Seconds, Meta(description="longest silence of a live worker before a request fails")
    ] = 120.0
    keepalive_s: Annotated[
        Seconds, Meta(description="a stream silent for this long gets a keep-alive comment")
    ] = 10.0
    frame_interval_s: Annotated[
        float, Meta(ge=0, le=1, description="tokens of one stream ready within this share a frame")
    ] = 0.005
    prepare_cache_bytes: Annotated[
        int, Meta(ge=0, description="memory for tokens of conversations seen before")
    ] = 48 << 20
    session_prompts_bytes: Annotated[
        int, Meta(ge=0, description="memory for the last prompt of each session, to prefetch it")
    ] = 32 << 20
    speculative_tokens: Annotated[
        int, Meta(ge=0, description="most tokens computed ahead of a turn that asks for it")
    ] = 8192
    responses_ttl_s: Annotated[
        Seconds, Meta(description="how long a stored response can be continued or read")
    ] = 86400.0
    responses_bytes: Annotated[
        int, Meta(ge=1 << 20, description="most bytes of stored responses; the oldest go first")
    ] = 1 << 30
    responses_tenant_share: Annotated[
        float, Meta(gt=0, le=1, description="share of these that one tenant has at most")
    ] = 0.25
    body_timeout_s: Annotated[
        Seconds, Meta(description="longest time for a request body to arrive")
    ] = 30.0
    idle_timeout_s: Annotated[
        Seconds, Meta(description="a connection without a request is closed after this long")
    ] = 75.0
    slow_reader_s: Annotated[
        Seconds, Meta(description="a client that reads nothing for this long is cut")
    ] = 30.0
    linger_s: Annotated[
        float,
        Meta(ge=0, description="serve on for this long when told to stop, with /health at 503"),
    ] = 0.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for running answers when told to stop")
    ] = 60.0
    migration_limit: Annotated[
        int, Meta(ge=0, description="how often a request may move to another worker")
    ] = 3
