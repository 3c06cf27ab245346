"""Addresses, credentials and TLS of the connection to NATS."""

from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.bus.subjects import API


@dataclass(frozen=True)
class BusOptions:
    """Server addresses, credentials and TLS. `url` may list several servers, separated by commas.

    With `tls_ca` or a certificate, every server must offer TLS.
    """

    url: str = field(default="nats://127.0.0.1:4222", repr=False)
    namespace: str = "kvmesh"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: str | None = None
    replicas: int = 1
    nkey_seed: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_handshake_first: bool = False
    inbox_prefix: str = "_INBOX"
    api_prefix: str = API
    bucket_bytes: int = 256 << 20  # of a bucket, where the account demands a size
