"""Latest statistics of vLLM's schedulers, one per data-parallel rank, for load reports."""

import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvmesh.index import TIERS
from kvmesh.runtime.lru import LruCache
from kvmesh.worker.adapters.cached_sources import LOADED_TOKENS
from kvmesh.worker.adapters.connector_series import CORRUPT, LOAD_RATIO, LOADED, SKIPPED, WRITTEN
from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.enginecore.counters import EngineCounters
from kvmesh.worker.engines.vllm.kvbm.settings import CONNECTOR as KVBM_CONNECTOR
from kvmesh.worker.engines.vllm.retention.settings import CONNECTOR as RETENTION_CONNECTOR
from kvmesh.worker.engines.vllm.retention.settings import OUTCOMES, PREFILL_STEPS, STATE

MAX_LOADED_REQUESTS = 4096
IDLE_S = 1.0


class RankStats:
    """Latest figures of one rank; `usage` is the share of blocks in use.

    `load_ratio` is the time to load a block from the kvbm over that to compute it, 0 if unknown.

    A rank is busy between `begin` and `forget` of a request. vLLM steps without pause while
    requests only wait for onboarded blocks or a grammar: one such step per IDLE_S counts, as a sign
    of life, and their time is not busy time.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self.usage = 0.0
        self.counters = EngineCounters()
        self.preemptions = 0
        self.load_ratio = 0.0
        self._last_step = 0.0
        self._last_idle_step = 0.0
        self._active_requests = 0
        self._loaded: LruCache[str, list[int]] = LruCache(MAX_LOADED_REQUESTS)
        self._loaded_blocks = [0] * TIERS
        self._served: LruCache[str, list[int]] = LruCache(MAX_LOADED_REQUESTS)
        self._served_tokens = [0] * TIERS
        self._connector: dict[str, Any] = {}
        self._outcomes: LruCache[str, list[str]] = LruCache(MAX_LOADED_REQUESTS)
        self.retention: dict[str, Any] = {}

    def begin(self) -> None:
        """Count a request; the first step of an idle rank is timed from here."""
        if not self._active_requests:
            self._last_step = time.monotonic()
        self._active_requests += 1

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Record the statistics of a step; either argument may be None."""
        now = time.monotonic()
        if scheduler is not None:
            busy = scheduler.num_running_reqs > 0
            self.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self.usage = scheduler.kv_cache_usage
            self._count(now)
            self._last_step = now if busy else 0.0
            self._record_connectors(scheduler.kv_connector_stats or {})
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs

    def below(self, request: str, block_size: int) -> list[int]:
        """Tokens loaded for a request by tier, from tier 1 on; known before its first token."""
        onboarded = [blocks * block_size for blocks in self._loaded.peek(request) or []]
        served = self._served.peek(request) or []
        return [sum(tokens) for tokens in zip_longest(onboarded, served, fillvalue=0)]

    def outcomes(self, request: str) -> list[str] | None:
        """Outcomes of a prompt's explicit directives; known before its first token."""
        return self._outcomes.peek(request)

    def forget(self, request: str) -> None:
        self._active_requests -= 1
        self._outcomes.pop(request)
        self._loaded.pop(request)
        self._served.pop(request)

    def tier_counts(self, block_size: int) -> TierCounts:
        """The blocks that this rank has moved between tiers so far."""
        totals = self._connector
        rows = zip(self._loaded_blocks, self._served_tokens, strict=True)
        return TierCounts(
            loaded=[blocks + tokens // block_size for blocks, tokens in rows],
            written=totals.get(WRITTEN, 0),
            skipped=totals.get(SKIPPED, 0),
            corrupt=totals.get(CORRUPT, 0),
        )

    def _count(self, now: float) -> None:
        if self._last_step:
            self.counters.count_steps(1, now - self._last_step)
        elif now - self._last_idle_step >= IDLE_S:
            self._last_idle_step = now
            self.counters.steps += 1

    def _record_connectors(self, stats: dict[str, Any]) -> None:
        """Record the statistics of the connectors, by class name if there are several."""
        for name in (KVBM_CONNECTOR, RETENTION_CONNECTOR):
            stats = {**stats, **stats.get(name, {})}
        self.retention = stats.get(STATE, self.retention)
        self.load_ratio = stats.get(LOAD_RATIO, self.load_ratio)
        counters = self.counters
        counters.prefill_steps = stats.get(PREFILL_STEPS, counters.prefill_steps)
        for request, outcomes in stats.get(OUTCOMES, {}).items():
            self._outcomes.put(request, outcomes)
        self._connector |= {k: v for k, v in stats.items() if k in (WRITTEN, SKIPPED, CORRUPT)}
        for request, blocks in stats.get(LOADED, {}).items():
            self._loaded.put(request, blocks)
            for tier, count in enumerate(blocks, 1):
                self._loaded_blocks[tier] += count
        for request, tokens in stats.get(LOADED_TOKENS, {}).items():
            self._served.put(request, tokens)
            for tier, count in enumerate(tokens, 1):
                self._served_tokens[tier] += count


def tier_counts(ranks: Sequence[RankStats], block_size: int) -> TierCounts:
    """The blocks that all ranks have moved between tiers so far."""
    counts = [rank.tier_counts(block_size) for rank in ranks]
    return TierCounts(
        loaded=[sum(tiers) for tiers in zip(*(c.loaded for c in counts), strict=True)],
        written=sum(c.written for c in counts),
        skipped=sum(c.skipped for c in counts),
        corrupt=sum(c.corrupt for c in counts),
    )


def managed_ranks(llm: Any) -> list[int]:
    """The ranks of an `AsyncLLM` or of a server's client, among those of the whole deployment.

    vLLM numbers the ranks of a request, and of a command's replies, from 0 in this order. With a
    load balancer of the user's own, each server has some of them (`data_parallel_rank`,
    `data_parallel_start_rank`), and names them so in events and metrics.
    """
    managed = getattr(llm.engine_core, "engine_ranks_managed", None)
    return list(managed or range(llm.vllm_config.parallel_config.data_parallel_size))


class StatsCollector:
    """Provides vLLM's stat loggers, one per rank, and stores what they record."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankStats] = {}

    def rank(self, rank: int) -> RankStats:
        return self._ranks.setdefault(rank, RankStats())

    def logger(self, config: Any, rank: int = 0) -> StatLoggerBase:
        """Stat logger factory, called by vLLM once per rank."""
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
        """Log nothing at the start."""
