"""Settings of the oracle."""

from typing import Annotated, ClassVar

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Port, Seconds, Section


class OracleSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "window_s window_bytes"
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    window_s: Annotated[
        Seconds, Meta(description="longest window of past requests that it simulates")
    ] = 1800.0
    window_bytes: Annotated[
        Count, Meta(description="most memory for their block hashes, in bytes")
    ] = 64 << 20
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
