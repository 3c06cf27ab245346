"""Settings of the dashboard."""

from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta

from kvmesh.settings.schema.common import LOOPBACK, Count, Port, Seconds, Section


class DashboardSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "window_s window_bytes max_viewers whatif_s"
    host: Annotated[str, Meta(description="address to listen on")] = LOOPBACK
    port: Annotated[Port, Meta(description="port to listen on; 0 picks a free one")] = 8090
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    keys_file: Annotated[
        Path | None,
        Meta(description="TOML file of API keys, as of frontends; none: no key is needed"),
    ] = None
    keys_bucket: Annotated[bool, Meta(description="read API keys from the mesh's bucket")] = False
    allow_anonymous: Annotated[
        bool, Meta(description="listen beyond loopback without API keys")
    ] = False
    window_s: Annotated[Seconds, Meta(description="age of the oldest requests that it shows")] = (
        900.0
    )
    window_bytes: Annotated[
        Count, Meta(description="most memory for requests and their block hashes, in bytes")
    ] = 128 << 20
    max_viewers: Annotated[
        Count, Meta(description="pages open at once; further ones are refused")
    ] = 64
    whatif_s: Annotated[
        Seconds, Meta(description="longest capture, and longest simulation, of one “What if”")
    ] = 60.0
