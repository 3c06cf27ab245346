"""vLLM's Prometheus metrics of kvmesh's connectors."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics


class UnexportedStats(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM has no types here
    """Exports nothing: the worker has metrics of its own. Several connectors require one each."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Ignore the statistics of a step."""
