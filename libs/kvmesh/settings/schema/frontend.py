"""Settings of the frontend."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import (
    LIVE,
    Amount,
    Count,
    Port,
    Seconds,
    Secret,
    Section,
    Weight,
)


class FrontendSettings(Section, frozen=True, kw_only=True):
    """
    host: address to listen on
    port: port to listen on; 0 picks a free one
    name: stable name; empty derives one
    processes: frontend processes that share the port
    metrics_port: port of this process's own /metrics and /health; 0: none
    access_log: log of one line per request, on standard output; auto: as log.format
    metrics_compat: metrics also under the names of NVIDIA Dynamo's frontend
    keys_file: TOML file of API keys; none: no key is needed
    keys_bucket: read API keys from the mesh's bucket
    allow_anonymous: listen beyond loopback without API keys
    cors_origins: origins whose web pages may call the API, as https://HOST[:PORT]; *: all
    tenant_secret: 64 hexadecimal digits, the secret that separates tenants; none: the mesh's
    max_body_bytes: largest request body
    max_images: most images in a conversation
    max_image_bytes: largest file of an image
    max_image_pixels: most pixels of an image
    image_hosts: hosts, as HOST[:PORT], from which images may be fetched by https
    max_in_flight: requests served at once; beyond, as many again of tenants below an equal share,
        and the others are refused
    route_timeout_s: longest wait for a placement
    speculative_prefill: prefill predicted prompts: where trials show that it pays, only where
        requests ask for it, or never
    responses_ttl_s: time for which a stored response can be read or continued
    websocket_bytes: memory for the conversations that WebSockets keep for their next request; 0: no
        WebSockets
    websocket_idle_s: a WebSocket without a request is closed after this long
    linger_s: continue to serve for this long after SIGTERM, with /health at 503
    drain_timeout_s: longest wait for running requests on shutdown
    migration_limit: most migrations of one request to other workers

    Tuning:
    reuse_port: let other processes listen on the same port
    metrics_tenants: tenants with metrics by name, those with the most tokens; others count as one;
        0: no metrics by tenant
    restart_wait_s: longest wait for a router or worker if none is running
    wake_timeout_s: longest wait for the first worker of an idle model
    max_waking: sequences that may wait for idle models; others are refused as overload
    prefill_timeout_s: longest wait for a prefill worker before prefilling on the decode worker
    stall_timeout_s: longest time without output of a live worker before a request fails
    keepalive_s: a stream without output for this long gets a keep-alive comment
    prepare_cache_bytes: memory for the bodies and tokens of conversations
    share_prefixes: put what Claude Code's prompts say about the folder behind what all its sessions
        share; moves system text into the first user message
    session_prompts_bytes: memory for the last prompt of each session, for prefetching
    speculative_tokens: most tokens of one speculative prefill; a trial has at most 8,192
    responses_bytes: largest size of all stored responses; the oldest are deleted first
    responses_tenant_share: largest share of that for one tenant
    files_bytes: largest size of all files and results of batches, a quarter of it for one tenant;
        NATS sets it aside when the first is stored
    max_file_bytes: largest file, or body with the requests of a batch
    files_ttl_s: time for which files, batches and their results are kept
    batch_in_flight: requests of batches that one frontend serves at once
    tenant_batches: batches of one tenant that may be in progress
    answers_bytes: memory for answers as they were generated, which prompts show again; 0 switches
        this off
    stored_answers_bytes: largest size of the answers that all frontends share on disk; the oldest
        are deleted first, 0 stores none
    stored_answers_ttl_s: time for which they are stored
    body_timeout_s: longest time to receive a request body
    idle_timeout_s: a connection without a request is closed after this long
    slow_reader_s: a client that reads nothing for this long is disconnected
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    name: str = ""
    processes: Annotated[int, Meta(ge=1, le=256)] = 1
    reuse_port: bool = False
    metrics_port: Port = 0
    access_log: Literal["off", "auto", "text", "json"] = "auto"
    metrics_tenants: Annotated[int, Meta(ge=0, le=1000)] = 20
    metrics_compat: Literal["none", "dynamo"] = "none"
    keys_file: Path | None = None
    keys_bucket: bool = False
    allow_anonymous: bool = False
    cors_origins: list[
        Annotated[str, Meta(pattern=r"^(\*|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+)$")]
    ] = []
    tenant_secret: Secret | None = None
    max_body_bytes: Count = 8 << 20
    max_images: Amount = 100
    max_image_bytes: Count = 5 << 20
    max_image_pixels: Count = 1 << 24
    image_hosts: list[Annotated[str, Meta(pattern=r"^[A-Za-z0-9.-]+(:[0-9]+)?$")]] = []
    max_in_flight: Annotated[Count, LIVE] = 4096
    route_timeout_s: Annotated[Seconds, LIVE] = 60.0
    restart_wait_s: Annotated[Seconds, LIVE] = 5.0
    wake_timeout_s: Annotated[Seconds, LIVE] = 300.0
    max_waking: Count = 1024
    prefill_timeout_s: Annotated[Seconds, LIVE] = 60.0
    stall_timeout_s: Annotated[Seconds, LIVE] = 120.0
    keepalive_s: Seconds = 10.0
    prepare_cache_bytes: Amount = 96 << 20
    share_prefixes: bool = False
    session_prompts_bytes: Amount = 32 << 20
    speculative_prefill: Literal["auto", "hinted", "off"] = "auto"
    speculative_tokens: Amount = 131_072
    responses_ttl_s: Seconds = 86400.0
    responses_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    responses_tenant_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    files_bytes: Annotated[int, Meta(ge=1 << 20)] = 2 << 30
    max_file_bytes: Count = 200 << 20
    files_ttl_s: Seconds = 30 * 86400.0
    batch_in_flight: Count = 1024
    tenant_batches: Count = 100
    answers_bytes: Amount = 64 << 20
    stored_answers_bytes: Amount = 1 << 30
    stored_answers_ttl_s: Seconds = 86400.0
    websocket_bytes: Amount = 128 << 20
    websocket_idle_s: Seconds = 900.0
    body_timeout_s: Seconds = 30.0
    idle_timeout_s: Seconds = 75.0
    slow_reader_s: Annotated[Seconds, LIVE] = 30.0
    linger_s: Annotated[Weight, LIVE] = 0.0
    drain_timeout_s: Annotated[Seconds, LIVE] = 60.0
    migration_limit: Annotated[Amount, LIVE] = 3
