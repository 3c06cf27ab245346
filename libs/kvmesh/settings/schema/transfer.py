"""Settings of KV transfer between processes."""

from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Port, Seconds, Section


class TransferSettings(Section, frozen=True, kw_only=True):
    via: Annotated[
        Literal["auto", "nixl", "tcp"],
        Meta(description="how KV blocks move between processes; auto: NIXL if both have it"),
    ] = "auto"
    host: Annotated[str, Meta(description="address on which blocks are served to others")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="its port; 0: a free one")] = 0
    advertise: Annotated[
        str, Meta(description="address by which others reach it; empty: that of host")
    ] = ""
    readers: Annotated[Count, Meta(description="readers served at once")] = 64
    staging_bytes: Annotated[
        Count, Meta(description="memory of a prefill or decode worker for blocks on their way")
    ] = 1 << 30
    lend_s: Annotated[
        Seconds, Meta(description="a prompt's blocks wait this long for the worker that goes on")
    ] = 30.0
    timeout_s: Annotated[
        Seconds, Meta(description="after this long a prompt is computed instead of fetched")
    ] = 10.0
