"""Settings of the kvbm."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from kvmesh.settings.schema.common import (
    LOOPBACK,
    Count,
    MetricsHost,
    Port,
    Seconds,
    Secret,
    Section,
    Url,
    Weight,
)


class KvbmSettings(Section, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    node: Annotated[
        str, Meta(description="the machine that its workers are on, too; empty: the host's name")
    ] = ""
    directory: Annotated[
        Path | None,
        Meta(description="folder in memory shared with the workers; none: one under /dev/shm"),
    ] = None
    host_bytes: Annotated[int, Meta(ge=1 << 20, description="memory for blocks, in bytes")] = (
        1 << 30
    )
    disk_path: Annotated[
        Path | None, Meta(description="folder on a local disk for blocks; none: no disk is used")
    ] = None
    disk_bytes: Annotated[int, Meta(ge=1 << 20, description="most bytes of blocks on disk")] = (
        16 << 30
    )
    disk_free_bytes: Annotated[
        int, Meta(ge=0, description="bytes of that disk which blocks leave free")
    ] = 1 << 30
    disk_frequency: Annotated[
        Weight, Meta(description="blocks asked for this often go to disk; a hit doubles it; 1: all")
    ] = 2.0
    disk_threads: Annotated[Count, Meta(description="reads and writes of the disk at once")] = 4
    remote_url: Annotated[
        Url,
        Meta(description="store of all nodes: redis://, rediss://, unix://, file://; empty: none"),
    ] = ""
    remote_bytes: Annotated[
        int, Meta(ge=1 << 20, description="most bytes of blocks in a shared folder")
    ] = 64 << 30
    remote_group: Annotated[
        bool, Meta(description="the user's group may read and write the shared folder, too")
    ] = False
    remote_lease_s: Annotated[
        Seconds, Meta(description="a block that nobody looks up there for this long goes")
    ] = 86400.0
    remote_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for an answer of that store")
    ] = 5.0
    remote_frequency: Annotated[
        Weight, Meta(description="blocks asked for this often go there; as disk-frequency")
    ] = 2.0
    peers: Annotated[
        bool, Meta(description="read blocks from the memory of other nodes; see transfer.host")
    ] = False
    tenant_share: Annotated[
        float, Meta(gt=0, le=1, description="most of a tier that one tenant may have kept longer")
    ] = 0.5
    retention: Annotated[
        list[str],
        Meta(description="defaults per kind of token, as KIND=PRIORITY or KIND=PRIORITY/SECONDS"),
    ] = []
    decay_s: Annotated[
        Seconds, Meta(description="a block counts as asked for once less after this long")
    ] = 300.0
    compute_patience_s: Annotated[
        Seconds, Meta(description="a worker that computes blocks silently this long is not awaited")
    ] = 30.0
    key: Annotated[
        Secret | None,
        Meta(description="64 hexadecimal digits under which blocks are named; none: the mesh's"),
    ] = None
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
    metrics_host: MetricsHost = LOOPBACK
