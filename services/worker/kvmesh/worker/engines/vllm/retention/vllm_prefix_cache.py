"""vLLM's prefix cache with the retaining free queue in its block pool."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvmesh.bus.messages import EVICTED
from kvmesh.worker.engines.vllm.retention.block_queue import RetainingBlockQueue
from kvmesh.worker.engines.vllm.retention.block_runs import RetainedRuns
from kvmesh.worker.engines.vllm.retention.removal_causes import RemovalCauses


class VllmPrefixCache:
    """`PrefixCache` over vLLM's `BlockPool`, whose free queue it replaces.

    Claims end with the content that they are about: when vLLM evicts blocks by number, since a
    transfer of their content failed, and when it resets its cache.
    """

    def __init__(self, pool: Any, runs: RetainedRuns, clock: Callable[[], float]) -> None:
        self._pool = pool
        self.causes = RemovalCauses(pool, runs.lapsed.get)
        queue = RetainingBlockQueue(pool.free_block_queue, type(pool.blocks[0]), runs, clock)
        evict, reset = pool.evict_blocks, pool.reset_prefix_cache

        def evict_blocks(block_ids: set[int]) -> None:
            evict(block_ids)
            queue.forget([pool.blocks[block] for block in block_ids])

        def reset_prefix_cache() -> bool:
            done: bool = reset()
            if done and runs.retained:
                queue.forget(pool.blocks)
            return done

        pool.free_block_queue = queue
        pool.evict_blocks, pool.reset_prefix_cache = evict_blocks, reset_prefix_cache

    def find(self, block_hash: bytes, group: int) -> list[int]:
        key = make_block_hash_with_group_id(block_hash, group)
        found = self._pool.cached_block_hash_to_block._cache.get(key)
        if found is None:
            return []
        return list(found) if isinstance(found, dict) else [found.block_id]

    def first_copies(self, blocks: Sequence[int]) -> list[int]:
        held, cached = self._pool.blocks, self._pool.cached_block_hash_to_block._cache
        first: list[int] = []
        for block in blocks:
            copies = cached.get(held[block].block_hash)
            first.append(next(iter(copies)) if isinstance(copies, dict) else block)
        return first

    def holds(self, block: int) -> bool:
        return self._pool.blocks[block].block_hash is not None

    def is_free(self, block: int) -> bool:
        return bool(self._pool.blocks[block].ref_cnt == 0)

    def drop(self, blocks: list[int], reason: str, request: str | None) -> None:
        self.causes.reason, self.causes.request = reason, request
        self._pool.evict_blocks(set(blocks))
        self.causes.reason, self.causes.request = EVICTED, None
