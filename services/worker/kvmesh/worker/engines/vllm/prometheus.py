"""vLLM's Prometheus metrics of kvmesh's connectors."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvmesh.worker.adapters.connector_series import KVBM_COUNTERS, LOADED, LOADED_SERIES


class UnexportedStats(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM has no types here
    """Exports nothing: the worker has metrics of its own. Several connectors require one each."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Ignore the statistics of a step."""


class KvbmStats(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """Exports the blocks that a server moves, for the worker beside it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._loaded = self._counter_cls(
            name=LOADED_SERIES,
            documentation="Blocks loaded from the block manager, by tier.",
            labelnames=[*self._labelnames, "tier"],
        )
        self._counters = {
            key: self._counter_cls(
                name=series,
                documentation=f"{key.replace('_', ' ').capitalize()} of the block manager.",
                labelnames=self._labelnames,
            )
            for key, series in KVBM_COUNTERS.items()
        }
        self._totals: dict[tuple[int, str], int] = {}
        for engine in self.per_engine_labelvalues:  # by zeros a worker knows that there are series
            self.observe({}, engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count the blocks of a step; those moved to lower tiers come as totals."""
        labels = self.per_engine_labelvalues[engine_idx]
        for blocks in transfer_stats_data.get(LOADED, {}).values():
            for tier, count in enumerate(blocks, 1):
                self._loaded.labels(*labels, str(tier)).inc(count)
        for key, counter in self._counters.items():
            total = transfer_stats_data.get(key, 0)
            before = self._totals.get((engine_idx, key), 0)
            counter.labels(*labels).inc(max(0, total - before))
            self._totals[engine_idx, key] = max(total, before)
