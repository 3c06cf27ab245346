"""What vLLM's scheduler says after each step, kept for the worker's load."""

import time
from collections import OrderedDict
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.enginecore.counters import EngineCounters
from kvmesh.worker.engines.vllm.connector_stats import CORRUPT, LOADED, SKIPPED, WRITTEN

TIERS = 4
MAX_LOADED_REQUESTS = 4096
IDLE_S = 1.0


class RankStats:
    """The newest figures of one rank. `usage` is the share of blocks in use.

    Between `begin` and `forget` of a request a rank is busy. vLLM steps as fast as it can while
    requests only wait, for blocks from elsewhere or a grammar: of such steps one in IDLE_S counts,
    as a sign of life, and their time does not.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self.usage = 0.0
        self.counters = EngineCounters()
        self.preemptions = 0
        self._last = 0.0
        self._idle = 0.0
        self._requests = 0
        self._loaded: OrderedDict[str, list[int]] = OrderedDict()
        self._blocks = [0] * TIERS
        self._connector: dict[str, Any] = {}

    def begin(self) -> None:
        """A request has come; to a rank that had none, the first step begins with it."""
        if not self._requests:
            self._last = time.monotonic()
        self._requests += 1

    def record(self, scheduler: Any, iteration: Any) -> None:
        """One step; either part may be missing."""
        now = time.monotonic()
        if scheduler is not None:
            busy = scheduler.num_running_reqs > 0
            self.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self.usage = scheduler.kv_cache_usage
            self._count(now)
            self._last = now if busy else 0.0
            self._record_tiers(scheduler.kv_connector_stats or {})
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs

    def loaded(self, request: str) -> list[int]:
        """Blocks that a request got from below, by tier from 1 on; told before its first token."""
        return self._loaded.get(request, [])

    def forget(self, request: str) -> None:
        self._requests -= 1
        self._loaded.pop(request, None)

    @property
    def tier_counts(self) -> TierCounts:
        known = self._connector
        return TierCounts(
            loaded=self._blocks,
            written=known.get(WRITTEN, 0),
            skipped=known.get(SKIPPED, 0),
            corrupt=known.get(CORRUPT, 0),
        )

    def _count(self, now: float) -> None:
        if self._last:
            self.counters.count_steps(1, now - self._last)
        elif now - self._idle >= IDLE_S:
            self._idle = now
            self.counters.steps += 1

    def _record_tiers(self, told: dict[str, Any]) -> None:
        """What our connector says, if it is there."""
        self._connector |= told
        for request, blocks in told.get(LOADED, {}).items():
            self._loaded[request] = blocks
            for tier, count in enumerate(blocks, 1):
                self._blocks[tier] += count
        while len(self._loaded) > MAX_LOADED_REQUESTS:
            self._loaded.popitem(last=False)


class StatsCollector:
    """Gives vLLM a logger per rank and keeps what the loggers are told."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankStats] = {}

    def rank(self, rank: int) -> RankStats:
        return self._ranks.setdefault(rank, RankStats())

    def logger(self, config: Any, rank: int = 0) -> StatLoggerBase:
        """The factory that vLLM calls once per rank."""
        return _Logger(self.rank(rank))


class _Logger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not installed where types are checked
    def __init__(self, stats: RankStats) -> None:
        self._stats = stats

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._stats.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say at the start."""
