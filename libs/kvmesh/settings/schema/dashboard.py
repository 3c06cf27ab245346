"""Settings of the dashboard."""

from pathlib import Path

from kvmesh.settings.schema.common import LOOPBACK, Count, Port, Seconds, Section


class DashboardSettings(Section, frozen=True, kw_only=True):
    """
    host: address to listen on
    port: port to listen on; 0 picks a free one
    name: stable name; empty derives one
    keys_file: TOML file of API keys, as of frontends; none: no key is needed
    keys_bucket: read API keys from the mesh's bucket
    allow_anonymous: listen beyond loopback without API keys

    Tuning:
    window_s: age of the oldest requests that it shows
    window_bytes: most memory for requests and their block hashes, in bytes
    max_viewers: pages open at once; further ones are refused
    whatif_s: longest capture, and longest simulation, of one “What if”
    """

    host: str = LOOPBACK
    port: Port = 8090
    name: str = ""
    keys_file: Path | None = None
    keys_bucket: bool = False
    allow_anonymous: bool = False
    window_s: Seconds = 900.0
    window_bytes: Count = 128 << 20
    max_viewers: Count = 64
    whatif_s: Seconds = 60.0
