"""Free queue of vLLM's block pool that evicts retained blocks by rank.

It has the methods of `vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue`. Blocks without claims are
in one list by recency, as in vLLM; those with claims are in their runs. A rank below the default
comes before the list, a higher one after it. Blocks without content, which vLLM puts at the start
of the list, precede all others.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.retention.claims import DEFAULT_LEVEL, MAX_LEVEL
from kvmesh.worker.enginecore.counters import BY_RECENCY
from kvmesh.worker.engines.vllm.retention.block_runs import FreeList, RetainedRun, RetainedRuns

PLAIN = (DEFAULT_LEVEL, 0.0)
LAST = (MAX_LEVEL + 1, 0.0)


class RetainingBlockQueue:
    """Takes over the free blocks of vLLM's queue; `clock` returns seconds."""

    def __init__(
        self, queue: Any, block_type: Any, runs: RetainedRuns, clock: Callable[[], float]
    ) -> None:
        self.num_free_blocks: int = queue.num_free_blocks
        self._plain = FreeList(block_type)
        self._plain.append(queue.popleft_n(queue.num_free_blocks))
        self._runs = runs
        self._clock = clock
        self._stamps = array("Q", bytes(8 * len(runs.by_block)))

    @property
    def fake_free_list_head(self) -> Any:
        return self._plain.head

    @property
    def fake_free_list_tail(self) -> Any:
        return self._plain.tail

    def popleft(self) -> Any:
        """Remove and return the block to evict first."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Remove and return the `n` blocks to evict first; there are at least as many."""
        if self.num_free_blocks < n:
            raise ValueError(f"{n} blocks were requested, {self.num_free_blocks} are free")
        self.num_free_blocks -= n
        self._runs.lapsed.clear()
        taken: list[Any] = []
        if not self._runs.retained:
            taken = self._plain.take(n)
            self._runs.evictions[BY_RECENCY] += _with_content(taken)
        now = self._clock() if len(taken) < n else 0.0
        while len(taken) < n:
            taken += self._take(n - len(taken), now)
        self._runs.evicted(taken)
        return taken

    def remove(self, block: Any) -> None:
        """Remove a free block: a request uses it again."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"block {block.block_id} is not free")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Add a block as the most recently used."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Add blocks as the most recently used, the first to evict first."""
        if not blocks:
            return
        self.num_free_blocks += len(blocks)
        if not self._runs.retained:
            self._plain.append(blocks)
            return
        now, by_block = self._clock(), self._runs.by_block
        start, current = 0, by_block[blocks[0].block_id]
        for at, block in enumerate(blocks):
            run = by_block[block.block_id]
            if run is not current:
                self._add(blocks[start:at], current, now)
                start, current = at, run
        self._add(blocks[start:], current, now)

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Add blocks without content as the first to evict."""
        if not blocks:
            return
        if self._runs.retained:
            self._runs.forget(block.block_id for block in blocks)
        self._plain.prepend(blocks)
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks; those without claims first, in the order of eviction."""
        runs = {id(run): run for run in self._runs.by_block if run is not None}
        return [*self._plain, *(block for run in runs.values() for block in run.free)]

    def forget(self, blocks: Sequence[Any]) -> None:
        """End the claims of blocks that have lost their content; free ones are evicted first."""
        free = [block for block in blocks if block.next_free_block is not None]
        for block in free:
            self.remove(block)
        self._runs.forget(block.block_id for block in blocks)
        self.prepend_n(free)

    def _take(self, limit: int, now: float) -> list[Any]:
        empty = self._plain.empty(limit)
        if empty:
            return self._plain.take(empty)
        run = self._runs.lowest(now)
        rank = run.entry[:2] if run is not None and run.entry is not None else LAST
        if run is not None and (rank < PLAIN or not self._plain):
            return self._runs.evict(run, limit, now)
        if run is not None and rank == PLAIN and self._first_stamp() > run.stamp:
            return self._runs.evict(run, limit, now)
        taken = self._plain.take(limit if rank > PLAIN else 1)
        self._runs.evictions[BY_RECENCY] += len(taken)
        return taken

    def _first_stamp(self) -> int:
        block_id: int = self._plain.head.next_free_block.block_id
        return self._stamps[block_id]

    def _add(self, blocks: Sequence[Any], run: RetainedRun | None, now: float) -> None:
        if run is None or not self._runs.end_use(run, blocks, now):
            stamp, stamps = self._runs.next_stamp(), self._stamps
            for block in blocks:
                stamps[block.block_id] = stamp
            self._plain.append(blocks)


def _with_content(blocks: Sequence[Any]) -> int:
    """The number of blocks with content, which follow those without any."""
    if blocks and blocks[0].block_hash is not None:
        return len(blocks)
    return sum([block.block_hash is not None for block in blocks])
