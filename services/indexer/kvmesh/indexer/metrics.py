"""The indexer's metrics, read at each scrape: the event path counts in plain integers."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

QUERY_S = Histogram(
    "kvmesh_indexer_query_seconds",
    "Time of one overlap query, without the bus",
    buckets=(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 1e-1, 1.0),
)

COUNTERS = {
    "messages": "Messages read from the KV stream",
    "batches": "Readable batches of events",
    "stored_blocks": "Blocks in applied store events",
    "removed_blocks": "Blocks that applied remove events dropped",
    "cleared": "Applied clear events",
    "duplicates": "Events skipped: already applied",
    "stale": "Batches skipped: their instance was replaced or its lease lapsed",
    "gaps": "Times a rank's state became unknown",
    "orphans": "Store events without a known parent block",
    "bad_events": "Unreadable events",
    "malformed": "Unreadable messages",
    "stream_gaps": "Times unread messages of the KV stream were dropped",
    "dump_requests": "Dumps requested from workers",
    "queries": "Overlap queries served",
    "prompts": "Prompts in overlap queries",
    "bad_queries": "Overlap queries that were unreadable or invalid",
    "shard_errors": "Queries to another shard without a reply",
    "snapshots": "Snapshots written",
    "snapshot_failures": "Failed snapshots",
    "snapshots_skipped": "Unusable stored snapshots",
    "index_checks": "Ranks compared with their workers",
    "index_differences": "Ranks that differed, and were dumped anew",
    "inconclusive_checks": "Comparisons without a result: no reply, or events came too fast",
    "missing_blocks": "Blocks of workers that the index lacked in comparisons",
    "extra_blocks": "Blocks in the index that workers lacked in comparisons",
}
GAUGES = {
    "blocks": "Distinct blocks in the index",
    "entries": "Entries (rank, tier, block) in the index",
    "memory_bytes": "Memory of the index",
    "ranks": "Ranks in the index",
    "unknown_ranks": "Ranks without overlaps until their dump arrives",
    "pending": "Unread messages of the KV stream",
    "lag_seconds": "Seconds by which the index may be behind the stream",
    "ready": "1 while this replica serves queries",
    "applied_seq": "Stream sequence of the newest applied message",
    "snapshot_seq": "Stream sequence covered by the newest snapshot",
    "snapshot_bytes": "Size of the newest snapshot",
}


class StateCollector(Collector):
    """Exports the mapping that `read` returns; its keys are those of COUNTERS and GAUGES."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        values = self._read()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvmesh_indexer_{name}", text, value=values.get(name, 0))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvmesh_indexer_{name}", text, value=values.get(name, 0))
