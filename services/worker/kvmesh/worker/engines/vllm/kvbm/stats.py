"""Speeds and counts of the connector, reported with vLLM's statistics after each step."""

from collections import deque
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvmesh.worker.adapters.connector_series import LOADED, SKIPPED, WRITTEN
from kvmesh.worker.adapters.copies.block_copies import Span
from kvmesh.worker.adapters.throughput import MIN_MEASURED_TOKENS, Throughput

COMPUTE, COPY = "compute_tps", "copy_bps"
PENDING = 16


class KvmeshConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """Latest speeds and totals; LOADED has blocks by tier for each request that loads some."""

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
        """Figures for vLLM's own log."""
        figures = {key: round(value) for key, value in self.data.items() if key != LOADED}
        return {**figures, LOADED: sum(map(sum, self.data.get(LOADED, {}).values()))}

    def is_empty(self) -> bool:
        return not self.data


class StepMeter:
    """Measures the speeds of prefill and of copies from the arena; at most PENDING steps wait."""

    def __init__(self) -> None:
        self._compute = Throughput()
        self._copy = Throughput()
        self._steps: deque[tuple[int, Span]] = deque(maxlen=PENDING)
        self._reported: dict[str, float] = {}

    def copied(self, size: int, seconds: float) -> None:
        """Record a copy of `size` bytes from the arena."""
        self._copy.record(size, seconds)

    def computed(self, tokens: int, step: Span) -> None:
        """Record a step that computes `tokens` prompt tokens."""
        if tokens >= MIN_MEASURED_TOKENS:
            self._steps.append((tokens, step))

    def take(self, written: int, skipped: int) -> KvmeshConnectorStats | None:
        """Current figures; None if unchanged since the last call."""
        while self._steps and self._steps[0][1].ended:
            tokens, step = self._steps.popleft()
            self._compute.record(tokens, step.seconds)
        figures = {
            COMPUTE: self._compute.value,
            COPY: self._copy.value,
            WRITTEN: written,
            SKIPPED: skipped,
        }
        if figures == self._reported:
            return None
        self._reported = figures
        return KvmeshConnectorStats(figures)
