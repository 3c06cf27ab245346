"""Runs: blocks of vLLM with the same claims, in the order in which they are evicted.

A block belongs to at most one run; blocks without claims belong to none. The free blocks of a run
are a linked list through vLLM's own fields, as vLLM's free queue is, so that vLLM removes a block
from either in the same way. Claims, ranks and expiry cost one operation per run, not per block.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from math import inf
from typing import Any, TypeAlias

from kvmesh.bus.messages import CLIPPED, EXPIRED, SUPERSEDED
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import (
    DOUBTFUL,
    BlockRetention,
    EvictionRank,
    rank_of,
)
from kvmesh.worker.enginecore.counters import (
    BY_CLAIM,
    BY_RECENCY,
    EVICTION_ORDERS,
)

SLACK = 64
NO_FLOOR = EvictionRank(-100, 0.0)
Entry: TypeAlias = tuple[int, float, int, "RetainedRun"]


class FreeList:
    """A linked list of free blocks between two sentinels of vLLM's block type."""

    __slots__ = ("head", "tail")

    def __init__(self, block_type: Any) -> None:
        self.head = block_type(block_id=-1)
        self.tail = block_type(block_id=-1)
        self.head.next_free_block = self.tail
        self.tail.prev_free_block = self.head

    def __bool__(self) -> bool:
        return self.head.next_free_block is not self.tail

    def __iter__(self) -> Iterator[Any]:
        block = self.head.next_free_block
        while block is not self.tail:
            following = block.next_free_block
            yield block
            block = following

    def append(self, blocks: Sequence[Any]) -> None:
        """Add blocks at the end, which is evicted last."""
        last, tail = self.tail.prev_free_block, self.tail
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = tail
        tail.prev_free_block = last

    def prepend(self, blocks: Sequence[Any]) -> None:
        """Add blocks at the start, which is evicted first."""
        last, first = self.head, self.head.next_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = first
        first.prev_free_block = last

    def empty(self, limit: int) -> int:
        """The number of blocks without content at the start, up to `limit`."""
        block, found = self.head.next_free_block, 0
        while found < limit and block is not self.tail and block.block_hash is None:
            block, found = block.next_free_block, found + 1
        return found

    def take(self, limit: int) -> list[Any]:
        """Remove and return up to `limit` blocks from the start."""
        taken: list[Any] = []
        block, tail = self.head.next_free_block, self.tail
        for _ in range(limit):
            if block is tail:
                break
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        self.head.next_free_block = block
        block.prev_free_block = self.head
        return taken


class RetainedRun:
    """`size` blocks with equal claims; those in `free` are unused.

    `floor` is the rank of blocks that depend on these: none of a run is evicted before them.
    `doubtful`: the session that used the blocks may have left them. `lapsed`: claims on them have
    expired. Once freed, a run has a `stamp` of its last use, and an `entry` in the order of
    eviction.
    """

    __slots__ = (
        "doubtful",
        "entry",
        "floor",
        "free",
        "lapsed",
        "retention",
        "size",
        "stamp",
    )

    def __init__(self, retention: BlockRetention, free: FreeList) -> None:
        self.retention = retention
        self.free = free
        self.size = 0
        self.stamp = 0
        self.floor = NO_FLOOR
        self.doubtful = False
        self.lapsed = False
        self.entry: Entry | None = None

    def eviction_rank(self, now: float) -> EvictionRank:
        """The higher rank of the blocks themselves and of those that depend on them."""
        rank, floor = self.retention.eviction_rank(now), self.floor
        claimed = rank if 0.0 < floor.until <= now else max(rank, floor)
        return rank_of(claimed, self.doubtful)

    def __lt__(self, other: "RetainedRun") -> bool:
        return self.stamp < other.stamp


class RetainedRuns:
    """The runs of a pool of vLLM's blocks, by block id, charged to the tenants' budgets.

    `lapsed` has the reason, EXPIRED or CLIPPED, for the blocks of the latest eviction whose
    retention had ended or was refused, by vLLM's hash. `evictions` counts evicted blocks by what
    ordered them.
    """

    def __init__(self, blocks: Sequence[Any], budget: RetentionBudget) -> None:
        self.by_block: list[RetainedRun | None] = [None] * len(blocks)
        self.retained = 0
        self.lapsed: dict[Any, str] = {}
        self._refused: set[int] = set()
        self._blocks = blocks
        self._block_type = type(blocks[0])
        self._budget = budget
        self._stamps = count(1)
        self._heap: list[Entry] = []
        self._expiries: list[tuple[float, int, Entry]] = []
        self._entries = 0
        self.evictions = dict.fromkeys(EVICTION_ORDERS, 0)

    def next_stamp(self) -> int:
        """A number that grows with time, for the order of last uses."""
        return next(self._stamps)

    # eviction

    def lowest(self, now: float) -> RetainedRun | None:
        """The run with free blocks of the lowest rank at `now`; None if no run has any."""
        self.expire(now)
        heap = self._heap
        while heap:
            run = heap[0][3]
            if run.entry is heap[0] and run.free:
                return run
            if run.entry is heap[0]:
                run.entry = None
            heapq.heappop(heap)
        return None

    def evict(self, run: RetainedRun, limit: int, now: float) -> list[Any]:
        """Remove and return up to `limit` free blocks of a run, last of the prompt first."""
        taken = run.free.take(limit)
        for block in taken:
            self.by_block[block.block_id] = None
        if run.doubtful and run.eviction_rank(now) == DOUBTFUL:
            self.evictions[BY_CLAIM] += len(taken)
            reason = SUPERSEDED
        else:
            self.evictions[BY_CLAIM if run.retention else BY_RECENCY] += len(taken)
            reason = EXPIRED if run.lapsed and not run.retention else ""
        if reason:
            self.lapsed.update(dict.fromkeys((block.block_hash for block in taken), reason))
        self._budget.on_evicted(run.retention, len(taken), now)
        self._shrink(run, len(taken))
        return taken

    def granted(self, blocks: Sequence[int], granted: bool) -> None:
        """Note that the budget has granted or refused a wish for these blocks."""
        if not granted:
            self._refused.update(blocks)
        elif self._refused:
            self._refused.difference_update(blocks)

    def evicted(self, blocks: Sequence[Any]) -> None:
        """Note the reason of those of the evicted blocks whose retention was refused."""
        for block in blocks if self._refused else ():
            if block.block_id in self._refused:
                self._refused.remove(block.block_id)
                self.lapsed[block.block_hash] = CLIPPED

    def expire(self, now: float) -> None:
        """End the claims that have expired by `now`, and rank their runs anew."""
        while self._expiries and self._expiries[0][0] <= now:
            entry = heapq.heappop(self._expiries)[2]
            run = entry[3]
            if run.entry is entry:
                self._budget.expire(run.retention, run.size, now)
                run.lapsed = not run.retention
                self._enter(run, now)

    # use

    def end_use(self, run: RetainedRun, freed: Sequence[Any], now: float) -> bool:
        """Add freed blocks to their run and restart its claims' times to live.

        False if the run has no claims any more: then its freed blocks have left it.
        """
        if run.doubtful:  # of those alone that have been used is there no doubt any more
            run = self.isolate([block.block_id for block in freed], run, "")
            run.doubtful = False
        self._budget.expire(run.retention, run.size, now)
        if not run.retention:
            self.forget(block.block_id for block in freed)
            return False
        run.lapsed = False
        run.retention.renew(now)
        run.free.append(freed)
        run.stamp = self.next_stamp()
        self._enter(run, now)
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove blocks from their runs; none of them is in a list of free blocks."""
        for block in blocks:
            run = self.by_block[block]
            if run is not None:
                self.by_block[block] = None
                self._budget.on_dropped(run.retention, 1)
                self._shrink(run, 1)

    # claims

    def doubt(self, run: RetainedRun, blocks: Sequence[int], doubtful: bool, now: float) -> None:
        """Doubt that a free run is used again, or no more; `blocks` are all of it."""
        run.doubtful = doubtful
        self.update(run, blocks, now)

    def segments(self, blocks: Sequence[int]) -> Iterator[tuple[int, int, RetainedRun | None]]:
        """Divide block ids where the run changes: (start, end, run), in order."""
        by_block = self.by_block
        start, current = 0, by_block[blocks[0]] if blocks else None
        for at, block in enumerate(blocks):
            run = by_block[block]
            if run is not current:
                yield start, at, current
                start, current = at, run
        if blocks:
            yield start, len(blocks), current

    def isolate(self, blocks: Sequence[int], run: RetainedRun | None, tenant: str) -> RetainedRun:
        """A run of exactly these blocks, all of which are in `run` or in none."""
        if run is None:
            made = RetainedRun(BlockRetention(tenant), FreeList(self._block_type))
        elif run.size == len(blocks):
            if not run.retention:
                run.retention.tenant = tenant
            return run
        else:
            made = RetainedRun(run.retention.copy(), FreeList(self._block_type))
            made.floor = run.floor
            made.doubtful, made.lapsed = run.doubtful, run.lapsed
            if not made.retention:
                made.retention.tenant = tenant
            run.size -= len(blocks)
        self._move(blocks, made)
        made.size = len(blocks)
        if run is None:
            self.retained += len(blocks)
        return made

    def merge(self, run: RetainedRun, blocks: Sequence[int], into: RetainedRun) -> None:
        """Move the `blocks` of a whole run with the same claims to another run."""
        self._move(blocks, into)
        into.size += run.size
        run.size, run.entry = 0, None

    def update(self, run: RetainedRun, blocks: Sequence[int], now: float) -> None:
        """Rank a run whose claims have changed; `blocks` are all of it.

        A run without claims is dissolved; its free blocks stay in the order of eviction by recency.
        """
        if run.free:
            run.stamp = run.stamp or self.next_stamp()
            self._enter(run, now)
        elif not run.retention:
            self.forget(blocks)

    def mergeable(self, one: RetainedRun, other: RetainedRun) -> bool:
        """True if two runs differ in their blocks alone, all of them used."""
        a, b = one.retention, other.retention
        return (
            a.claims == b.claims
            and a.tenant == b.tenant
            and a.charged == b.charged
            and a.pins == b.pins
            and one.doubtful == other.doubtful
            and not one.free
            and not other.free
        )

    # helpers

    def _move(self, blocks: Sequence[int], run: RetainedRun) -> None:
        freed: list[Any] = []
        for number in blocks:
            self.by_block[number] = run
            block = self._blocks[number]
            if block.next_free_block is not None:
                before, after = block.prev_free_block, block.next_free_block
                before.next_free_block, after.prev_free_block = after, before
                freed.append(block)
        if freed:
            run.free.append(freed[::-1])
            run.stamp = self.next_stamp()

    def _shrink(self, run: RetainedRun, blocks: int) -> None:
        run.size -= blocks
        self.retained -= blocks
        if not run.size:
            run.entry = None

    def _enter(self, run: RetainedRun, now: float) -> None:
        rank = run.eviction_rank(now)
        entry = (rank.level, rank.until, run.stamp, run)
        run.entry = entry
        heapq.heappush(self._heap, entry)
        if 0.0 < rank.until < inf:
            heapq.heappush(self._expiries, (rank.until, run.stamp, entry))
        if len(self._heap) + len(self._expiries) > self._entries:
            self._compact()

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[3].entry is entry]
        self._expiries = [e for e in self._expiries if e[2][3].entry is e[2]]
        heapq.heapify(self._heap)
        heapq.heapify(self._expiries)
        self._entries = 2 * (len(self._heap) + len(self._expiries)) + SLACK
