"""The indexer's metrics, read from its state when scraped: the event path counts plain integers."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

QUERY_S = Histogram(
    "kvmesh_indexer_query_seconds",
    "Time to answer one overlap query, without the bus",
    buckets=(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 1e-1, 1.0),
)

COUNTERS = {
    "messages": "Messages read from the KV stream",
    "batches": "Batches in them that could be read",
    "stored_blocks": "Blocks in applied store events",
    "removed_blocks": "Blocks that applied remove events dropped",
    "cleared": "Applied clear events",
    "duplicates": "Events skipped because they had been applied",
    "stale": "Batches of instances that had been replaced or had lapsed",
    "gaps": "Times that a rank's state became unknown",
    "orphans": "Store events whose parent block was not held",
    "bad_events": "Events that could not be read",
    "malformed": "Messages that could not be read",
    "holes": "Times that part of the KV stream was gone before it was read",
    "dump_requests": "Dumps that workers were asked for",
    "queries": "Overlap queries answered",
    "prompts": "Prompts in those queries",
    "bad_queries": "Overlap queries that could not be read or answered",
    "shard_errors": "Queries that another shard did not answer",
    "snapshots": "Snapshots written",
    "snapshot_failures": "Snapshots that could not be written",
    "snapshots_skipped": "Stored snapshots that could not be used",
}
GAUGES = {
    "blocks": "Distinct blocks in the index",
    "entries": "Entries (rank, tier, block) in the index",
    "memory_bytes": "Memory of the index",
    "ranks": "Ranks that hold or held something",
    "unknown_ranks": "Ranks that count zero until their dump arrives",
    "pending": "Messages of the KV stream not yet read",
    "lag_seconds": "Age of the newest applied message while more are waiting",
    "ready": "1 while this replica answers queries",
    "applied_seq": "Stream sequence of the newest applied message",
    "snapshot_seq": "Stream sequence that the newest snapshot covers",
    "snapshot_bytes": "Size of the newest snapshot",
}


class StateCollector(Collector):
    """Exports the mapping that `read` returns at each scrape; its keys are those above."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        values = self._read()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvmesh_indexer_{name}", text, value=values.get(name, 0))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvmesh_indexer_{name}", text, value=values.get(name, 0))
