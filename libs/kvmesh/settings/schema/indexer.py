"""Settings of the indexer."""

from typing import Literal

from kvmesh.settings.schema.common import Amount, Count, Port, Seconds, Section, Weight


class IndexerSettings(Section, frozen=True, kw_only=True):
    """
    name: stable name; empty derives one
    shards: shards of the index
    shard: shard of this replica, from 0
    shard_by: shard by model, adapter and tenant, or by the first block of a prompt
    reset_states: purge the KV stream and the snapshots, and start empty
    metrics_port: port of /metrics and /health; 0: none

    Tuning:
    snapshot_threshold: a snapshot is due after this many messages of the KV stream
    snapshot_age_s: … or when the newest is this old (a quarter of kv_age_s at most)
    removed_blocks: latest removed blocks whose reason is known, for `kvmesh explain`
    lag_limit_s: a replica further behind the stream stops replying
    check_interval_s: time between comparisons of one rank's blocks with its worker's; 0: none
    shard_timeout_s: longest wait for the reply of another shard
    """

    name: str = ""
    shards: Count = 1
    shard: Amount = 0
    shard_by: Literal["namespace", "root"] = "namespace"
    snapshot_threshold: Count = 1_000_000
    snapshot_age_s: Seconds = 3600.0
    removed_blocks: Amount = 1 << 18
    reset_states: bool = False
    lag_limit_s: Seconds = 2.0
    check_interval_s: Weight = 60.0
    shard_timeout_s: Seconds = 0.2
    metrics_port: Port = 0
