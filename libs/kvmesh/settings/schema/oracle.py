"""Settings of the oracle."""

from kvmesh.settings.schema.common import Count, Port, Seconds, Section


class OracleSettings(Section, frozen=True, kw_only=True):
    """
    name: stable name; empty derives one
    metrics_port: port of /metrics and /health; 0: none

    Tuning:
    window_s: longest window of past requests that it simulates
    window_bytes: most memory for their block hashes, in bytes
    """

    name: str = ""
    window_s: Seconds = 1800.0
    window_bytes: Count = 64 << 20
    metrics_port: Port = 0
