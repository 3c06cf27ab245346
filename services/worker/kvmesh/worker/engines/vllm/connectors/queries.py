"""vLLM's count of queries to an external cache, where no connector transfers anything."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from kvmesh.worker.engines.vllm.connectors.vllm_config import transfers_nothing

SILENT = "_kvmesh_counts_no_queries"


def count_no_queries(transferless: str) -> None:
    """Let schedulers whose only connector is `transferless` report no queries of its cache.

    vLLM counts the tokens of each prompt that it asks a connector for, so that one without a cache
    looks like an external cache that never has a hit.
    """
    if getattr(Scheduler, SILENT, False):
        return
    setattr(Scheduler, SILENT, True)
    make_stats = Scheduler.make_stats

    def make_own_stats(scheduler: Any, *arguments: Any, **named: Any) -> Any:
        stats = make_stats(scheduler, *arguments, **named)
        if stats is not None and transfers_nothing(scheduler.vllm_config, transferless):
            stats.connector_prefix_cache_stats = None
        return stats

    Scheduler.make_stats = make_own_stats
