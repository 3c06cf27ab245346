"""Settings of KV transfer between processes."""

from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Port, Seconds, Section


class TransferSettings(Section, frozen=True, kw_only=True):
    via: Annotated[
        Literal["auto", "nixl", "tcp"],
        Meta(description="transport of KV blocks between processes; auto: NIXL if both have it"),
    ] = "auto"
    host: Annotated[str, Meta(description="address on which blocks are served to others")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="its port; 0: a free one")] = 0
    advertise: Annotated[
        str, Meta(description="address that other processes connect to; empty: host")
    ] = ""
    readers: Annotated[Count, Meta(description="concurrent readers")] = 64
    staging_bytes: Annotated[
        Count,
        Meta(description="staging memory of a prefill or decode worker for blocks in transfer"),
    ] = 1 << 30
    lend_s: Annotated[
        Seconds,
        Meta(description="time for which a prefill worker lends a prompt's blocks"),
    ] = 30.0
    timeout_s: Annotated[
        Seconds, Meta(description="time after which a prompt is computed instead of transferred")
    ] = 10.0
