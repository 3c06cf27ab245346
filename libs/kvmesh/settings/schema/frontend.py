"""Settings of the frontend."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import (
    LIVE,
    Count,
    Port,
    Seconds,
    Secret,
    Section,
)


class FrontendSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = (
        "reuse_port metrics_tenants restart_wait_s wake_timeout_s max_waking "
        "prefill_timeout_s stall_timeout_s keepalive_s prepare_cache_bytes share_prefixes "
        "session_prompts_bytes speculative_tokens responses_bytes responses_tenant_share "
        "files_bytes max_file_bytes files_ttl_s batch_in_flight tenant_batches "
        "answers_bytes stored_answers_bytes stored_answers_ttl_s body_timeout_s "
        "idle_timeout_s slow_reader_s"
    )
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
    access_log: Annotated[
        Literal["off", "auto", "text", "json"],
        Meta(description="log of one line per request, on standard output; auto: as log.format"),
    ] = "auto"
    metrics_tenants: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="tenants with metrics by name, those with the most tokens; others count as"
            " one; 0: no metrics by tenant",
        ),
    ] = 20
    metrics_compat: Annotated[
        Literal["none", "dynamo"],
        Meta(description="metrics also under the names of NVIDIA Dynamo's frontend"),
    ] = "none"
    keys_file: Annotated[
        Path | None, Meta(description="TOML file of API keys; none: no key is needed")
    ] = None
    keys_bucket: Annotated[bool, Meta(description="read API keys from the mesh's bucket")] = False
    allow_anonymous: Annotated[
        bool, Meta(description="listen beyond loopback without API keys")
    ] = False
    cors_origins: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+)$")]],
        Meta(
            description="origins whose web pages may call the API, as https://HOST[:PORT]; *: all"
        ),
    ] = []
    tenant_secret: Annotated[
        Secret | None,
        Meta(
            description="64 hexadecimal digits, the secret that separates tenants; none: the mesh's"
        ),
    ] = None
    max_body_bytes: Annotated[Count, Meta(description="largest request body")] = 8 << 20
    max_images: Annotated[int, Meta(ge=0, description="most images in a conversation")] = 100
    max_image_bytes: Annotated[Count, Meta(description="largest file of an image")] = 5 << 20
    max_image_pixels: Annotated[Count, Meta(description="most pixels of an image")] = 1 << 24
    image_hosts: Annotated[
        list[Annotated[str, Meta(pattern=r"^[A-Za-z0-9.-]+(:[0-9]+)?$")]],
        Meta(description="hosts, as HOST[:PORT], from which images may be fetched by https"),
    ] = []
    max_in_flight: Annotated[
        Count,
        Meta(
            extra=LIVE,
            description="requests served at once; beyond, only tenants with less than an equal "
            "share are served, together as many again, and the others are refused as overload",
        ),
    ] = 4096
    route_timeout_s: Annotated[
        Seconds, Meta(extra=LIVE, description="longest wait for a placement")
    ] = 60.0
    restart_wait_s: Annotated[
        Seconds,
        Meta(extra=LIVE, description="longest wait for a router or worker if none is running"),
    ] = 5.0
    wake_timeout_s: Annotated[
        Seconds,
        Meta(extra=LIVE, description="longest wait for the first worker of an idle model"),
    ] = 300.0
    max_waking: Annotated[
        Count,
        Meta(description="sequences that may wait for idle models; others are refused as overload"),
    ] = 1024
    prefill_timeout_s: Annotated[
        Seconds,
        Meta(
            extra=LIVE,
            description="longest wait for a prefill worker before prefilling on the decode worker",
        ),
    ] = 60.0
    stall_timeout_s: Annotated[
        Seconds,
        Meta(
            extra=LIVE,
            description="longest time without output of a live worker before a request fails",
        ),
    ] = 120.0
    keepalive_s: Annotated[
        Seconds, Meta(description="a stream without output for this long gets a keep-alive comment")
    ] = 10.0
    prepare_cache_bytes: Annotated[
        int, Meta(ge=0, description="memory for the bodies and tokens of conversations")
    ] = 96 << 20
    share_prefixes: Annotated[
        bool,
        Meta(
            description="put what Claude Code's prompts say about the folder behind what all its"
            " sessions share; moves system text into the first user message"
        ),
    ] = False
    session_prompts_bytes: Annotated[
        int, Meta(ge=0, description="memory for the last prompt of each session, for prefetching")
    ] = 32 << 20
    speculative_prefill: Annotated[
        Literal["auto", "hinted", "off"],
        Meta(
            description="prefill predicted prompts: after answers where that pays, which trials "
            "measure, or only where requests ask for it, or never"
        ),
    ] = "auto"
    speculative_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="most tokens of one speculative prefill; a trial has at most 8,192",
        ),
    ] = 131_072
    responses_ttl_s: Annotated[
        Seconds, Meta(description="time for which a stored response can be read or continued")
    ] = 86400.0
    responses_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="largest size of all stored responses; the oldest are deleted first",
        ),
    ] = 1 << 30
    responses_tenant_share: Annotated[
        float, Meta(gt=0, le=1, description="largest share of that for one tenant")
    ] = 0.25
    files_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="largest size of all files and results of batches, a quarter of it for one"
            " tenant; NATS sets it aside when the first is stored",
        ),
    ] = 2 << 30
    max_file_bytes: Annotated[
        Count, Meta(description="largest file, or body with the requests of a batch")
    ] = 200 << 20
    files_ttl_s: Annotated[
        Seconds, Meta(description="time for which files, batches and their results are kept")
    ] = 30 * 86400.0
    batch_in_flight: Annotated[
        Count, Meta(description="requests of batches that one frontend serves at once")
    ] = 1024
    tenant_batches: Annotated[
        Count, Meta(description="batches of one tenant that may be in progress")
    ] = 100
    answers_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="memory for answers as they were generated, which prompts show in place "
            "of what clients return with the same meaning; 0 switches this off",
        ),
    ] = 64 << 20
    stored_answers_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="largest size of the answers that all frontends share on disk; the oldest "
            "are deleted first, 0 stores none",
        ),
    ] = 1 << 30
    stored_answers_ttl_s: Annotated[Seconds, Meta(description="time for which they are stored")] = (
        86400.0
    )
    websocket_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="memory for the conversations that WebSockets keep for their next request;"
            " 0: no WebSockets",
        ),
    ] = 128 << 20
    websocket_idle_s: Annotated[
        Seconds,
        Meta(description="a WebSocket without a request is closed after this long"),
    ] = 900.0
    body_timeout_s: Annotated[
        Seconds, Meta(description="longest time to receive a request body")
    ] = 30.0
    idle_timeout_s: Annotated[
        Seconds, Meta(description="a connection without a request is closed after this long")
    ] = 75.0
    slow_reader_s: Annotated[
        Seconds,
        Meta(extra=LIVE, description="a client that reads nothing for this long is disconnected"),
    ] = 30.0
    linger_s: Annotated[
        float,
        Meta(
            ge=0,
            extra=LIVE,
            description="continue to serve for this long after SIGTERM, with /health at 503",
        ),
    ] = 0.0
    drain_timeout_s: Annotated[
        Seconds, Meta(extra=LIVE, description="longest wait for running requests on shutdown")
    ] = 60.0
    migration_limit: Annotated[
        int, Meta(ge=0, extra=LIVE, description="most migrations of one request to other workers")
    ] = 3
