"""Settings of the kvbm."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Amount, Port, Seconds, Secret, Section, Url, Weight


class KvbmSettings(Section, frozen=True, kw_only=True):
    """
    name: stable name; empty derives one
    node: machine of this kvbm and its workers; empty: the host's name
    directory: folder in memory shared with the workers; none: one under /dev/shm
    host_bytes: memory for blocks, in bytes
    disk_path: folder for blocks on a local disk; none: no disk tier
    disk_bytes: largest size of the disk tier, in bytes
    remote_url: remote store: redis://, rediss://, unix:// or file:// URL; empty: none
    remote_bytes: largest size of a shared folder, in bytes
    peers: read blocks from the memory of other nodes; see transfer.host
    retention: default retention by kind of token, KIND=PRIORITY or KIND=PRIORITY/SECONDS
    key: 64 hexadecimal digits, the key of block digests; none: the mesh's
    metrics_port: port of /metrics and /health; 0: none

    Tuning:
    restore: load blocks into memory before forecast returns, if most are read
    disk_free_bytes: bytes of the disk that stay free
    disk_frequency: request frequency from which blocks go to disk; a hit doubles it; 1: all
    remote_group: let the user's group read and write the shared folder
    remote_lease_s: a block in the remote store expires after this long without a lookup
    remote_timeout_s: longest wait for a reply of the remote store
    remote_frequency: request frequency from which blocks go there; as disk-frequency
    tenant_share: largest share of a tier retained for one tenant
    compute_patience_s: longest wait for a worker that computes blocks without progress
    """

    name: str = ""
    node: str = ""
    directory: Path | None = None
    host_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    restore: Literal["auto", "off"] = "auto"
    disk_path: Path | None = None
    disk_bytes: Annotated[int, Meta(ge=1 << 20)] = 16 << 30
    disk_free_bytes: Amount = 1 << 30
    disk_frequency: Weight = 2.0
    remote_url: Url = ""
    remote_bytes: Annotated[int, Meta(ge=1 << 20)] = 64 << 30
    remote_group: bool = False
    remote_lease_s: Seconds = 86400.0
    remote_timeout_s: Seconds = 5.0
    remote_frequency: Weight = 2.0
    peers: bool = False
    tenant_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    retention: list[str] = []
    compute_patience_s: Seconds = 30.0
    key: Secret | None = None
    metrics_port: Port = 0
