"""Settings of the indexer."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Port, Seconds, Section


class IndexerSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = (
        "snapshot_threshold snapshot_age_s removed_blocks lag_limit_s check_interval_s "
        "shard_timeout_s"
    )
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    shards: Annotated[Count, Meta(description="shards of the index")] = 1
    shard: Annotated[int, Meta(ge=0, description="shard of this replica, from 0")] = 0
    shard_by: Annotated[
        Literal["namespace", "root"],
        Meta(description="shard by model, adapter and tenant, or by the first block of a prompt"),
    ] = "namespace"
    snapshot_threshold: Annotated[
        Count, Meta(description="a snapshot is due after this many messages of the KV stream")
    ] = 1_000_000
    snapshot_age_s: Annotated[
        Seconds,
        Meta(description="… or when the newest is this old (a quarter of kv_age_s at most)"),
    ] = 3600.0
    removed_blocks: Annotated[
        int,
        Meta(ge=0, description="latest removed blocks whose reason is known, for `kvmesh explain`"),
    ] = 1 << 18
    reset_states: Annotated[
        bool, Meta(description="purge the KV stream and the snapshots, and start empty")
    ] = False
    lag_limit_s: Annotated[
        Seconds, Meta(description="a replica further behind the stream stops replying")
    ] = 2.0
    check_interval_s: Annotated[
        float,
        Meta(
            ge=0,
            description="time between comparisons of one rank's blocks with its worker's; 0: none",
        ),
    ] = 60.0
    shard_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for the reply of another shard")
    ] = 0.2
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
