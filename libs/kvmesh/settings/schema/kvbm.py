"""Settings of the kvbm."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import (
    Port,
    Seconds,
    Secret,
    Section,
    Url,
    Weight,
)


class KvbmSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = (
        "restore disk_free_bytes disk_frequency remote_group remote_lease_s remote_timeout_s "
        "remote_frequency tenant_share compute_patience_s"
    )
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    node: Annotated[
        str, Meta(description="machine of this kvbm and its workers; empty: the host's name")
    ] = ""
    directory: Annotated[
        Path | None,
        Meta(description="folder in memory shared with the workers; none: one under /dev/shm"),
    ] = None
    host_bytes: Annotated[int, Meta(ge=1 << 20, description="memory for blocks, in bytes")] = (
        1 << 30
    )
    eviction: Annotated[
        Literal["forecast", "lru"],
        Meta(
            description="order of blocks without directives: by forecasts of their return or by use"
        ),
    ] = "forecast"
    restore: Annotated[
        Literal["auto", "off"],
        Meta(description="load blocks into memory before forecast returns, if most are read"),
    ] = "auto"
    disk_path: Annotated[
        Path | None, Meta(description="folder for blocks on a local disk; none: no disk tier")
    ] = None
    disk_bytes: Annotated[
        int, Meta(ge=1 << 20, description="largest size of the disk tier, in bytes")
    ] = 16 << 30
    disk_free_bytes: Annotated[int, Meta(ge=0, description="bytes of the disk that stay free")] = (
        1 << 30
    )
    disk_frequency: Annotated[
        Weight,
        Meta(
            description="request frequency from which blocks go to disk; a hit doubles it; 1: all"
        ),
    ] = 2.0
    remote_url: Annotated[
        Url,
        Meta(description="remote store: redis://, rediss://, unix:// or file:// URL; empty: none"),
    ] = ""
    remote_bytes: Annotated[
        int, Meta(ge=1 << 20, description="largest size of a shared folder, in bytes")
    ] = 64 << 30
    remote_group: Annotated[
        bool, Meta(description="let the user's group read and write the shared folder")
    ] = False
    remote_lease_s: Annotated[
        Seconds,
        Meta(description="a block in the remote store expires after this long without a lookup"),
    ] = 86400.0
    remote_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for a reply of the remote store")
    ] = 5.0
    remote_frequency: Annotated[
        Weight,
        Meta(description="request frequency from which blocks go there; as disk-frequency"),
    ] = 2.0
    peers: Annotated[
        bool, Meta(description="read blocks from the memory of other nodes; see transfer.host")
    ] = False
    tenant_share: Annotated[
        float, Meta(gt=0, le=1, description="largest share of a tier retained for one tenant")
    ] = 0.5
    retention: Annotated[
        list[str],
        Meta(
            description="default retention by kind of token, KIND=PRIORITY or KIND=PRIORITY/SECONDS"
        ),
    ] = []
    compute_patience_s: Annotated[
        Seconds, Meta(description="longest wait for a worker that computes blocks without progress")
    ] = 30.0
    key: Annotated[
        Secret | None,
        Meta(description="64 hexadecimal digits, the key of block digests; none: the mesh's"),
    ] = None
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
