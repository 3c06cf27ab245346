"""What vLLM's two halves of our connector measure and count, step by step, told with its stats."""

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvmesh.worker.adapters.throughput import MIN_MEASURED_TOKENS, Throughput

COMPUTE, COPY = "compute_tps", "copy_bps"
WRITTEN, SKIPPED, CORRUPT = "written_blocks", "skipped_blocks", "corrupt_blocks"
LOADED = "loaded"


class KvmeshConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """The newest speeds and totals, and LOADED: blocks by tier of requests that load them now."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        loaded = {**self.data.get(LOADED, {}), **other.data.get(LOADED, {})}
        self.data.update(other.data)
        if loaded:
            self.data[LOADED] = loaded
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's own log."""
        figures = {key: round(value) for key, value in self.data.items() if key != LOADED}
        return {**figures, LOADED: sum(map(sum, self.data.get(LOADED, {}).values()))}

    def is_empty(self) -> bool:
        return not self.data


class StepMeter:
    """Times the steps of the model runner: prompts computed, and blocks copied in meanwhile."""

    def __init__(self) -> None:
        self._compute = Throughput()
        self._copy = Throughput()
        self._began = 0.0
        self._copying = 0.0
        self._told: dict[str, float] = {}

    def begin(self) -> None:
        self._began, self._copying = time.perf_counter(), 0.0

    def copied(self, size: int, seconds: float) -> None:
        """So many bytes have come from the arena."""
        self._copying += seconds
        self._copy.record(size, seconds)

    def computed(self, tokens: int) -> None:
        """The step is over, in which so many tokens of prompts were computed."""
        if tokens >= MIN_MEASURED_TOKENS:
            self._compute.record(tokens, time.perf_counter() - self._began - self._copying)

    def take(self, written: int, skipped: int) -> KvmeshConnectorStats | None:
        """What is new since the last call, if anything."""
        figures = {
            COMPUTE: self._compute.value,
            COPY: self._copy.value,
            WRITTEN: written,
            SKIPPED: skipped,
        }
        if figures == self._told:
            return None
        self._told = figures
        return KvmeshConnectorStats(figures)
