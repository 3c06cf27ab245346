"""Eviction pool: unused blocks in the order in which they are evicted.

Unclaimed keys are in a list by recency, O(1) per operation; claimed keys are in a priority queue,
O(log n). A key is a block or a run of blocks.

A key with dependents (a block whose next block is held) is evicted after them, whatever its own
rank. Claims therefore need not agree along a prefix, and may be raised and lowered at any time.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import count
from math import inf
from typing import Generic, TypeAlias, TypeVar

from kvmesh.retention.claims import UNCLAIMED, EvictionRank

K = TypeVar("K", bound=Hashable)
Entry: TypeAlias = tuple[int, float, int, K]
SLACK = 64


class EvictionPool(Generic[K]):
    """Keys by (level, remaining time, recency), lowest first.

    `has_dependents(key)` is true if blocks depend on a key; the owner calls `unblock` once none
    do. `rerank(key, now)` returns the new rank of a key whose rank has expired.
    """

    def __init__(
        self,
        has_dependents: Callable[[K], bool],
        rerank: Callable[[K, float], EvictionRank],
    ) -> None:
        self._has_dependents = has_dependents
        self._rerank = rerank
        self._stamps = count()
        self._unclaimed: OrderedDict[K, int] = OrderedDict()
        self._entries: dict[K, Entry[K]] = {}
        self._heap: list[Entry[K]] = []
        self._expiries: list[tuple[float, Entry[K]]] = []
        self._blocked: set[K] = set()

    def __len__(self) -> int:
        return len(self._unclaimed) + len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._unclaimed or key in self._entries

    def add(self, key: K, rank: EvictionRank = UNCLAIMED) -> None:
        """Add a new key as the most recently used."""
        stamp = next(self._stamps)
        if rank != UNCLAIMED:
            self._push(key, rank, stamp)
        else:
            self._unclaimed[key] = stamp

    def discard(self, key: K) -> None:
        """Remove a key if present."""
        if self._unclaimed.pop(key, None) is not None:
            return
        if self._entries.pop(key, None) is not None:
            self._blocked.discard(key)

    def touch(self, keys: Iterable[K]) -> None:
        """Make the present ones of these keys the most recently used, in this order.

        Only for keys without claims: their rank becomes UNCLAIMED.
        """
        unclaimed, stamps = self._unclaimed, self._stamps
        for key in keys:
            if key in unclaimed:
                unclaimed[key] = next(stamps)
                unclaimed.move_to_end(key)
            elif key in self:
                self.discard(key)
                self.add(key)

    def eviction_rank(self, key: K) -> EvictionRank:
        """Return the rank given by `add` or `update`; KeyError if the key is absent."""
        if key in self._unclaimed:
            return UNCLAIMED
        return EvictionRank(*self._entries[key][:2])

    def update(self, key: K, rank: EvictionRank) -> None:
        """Change the rank of a key and leave its recency; KeyError if the key is absent."""
        if key in self._entries:
            self._push(key, rank, self._entries[key][2])
        elif rank != UNCLAIMED:
            self._push(key, rank, self._unclaimed.pop(key))

    def next_victim(self, now: float) -> K:
        """Return the key to evict first; IndexError if the pool is empty."""
        self.expire(now)
        while True:
            entry = self._lowest()
            if entry is None:
                raise IndexError("no key can be evicted")
            key = entry[3]
            if not self._has_dependents(key):
                return key
            self._unclaimed.pop(key, None)
            self._entries[key] = entry
            self._blocked.add(key)

    def unblock(self, key: K) -> None:
        """Make a key evictable: it no longer has dependents. The key may be absent."""
        if key in self._blocked:
            self._blocked.remove(key)
            heapq.heappush(self._heap, self._entries[key])

    def expire(self, now: float) -> None:
        """Rerank the keys whose rank has expired by `now`."""
        while self._expiries and self._expiries[0][0] <= now:
            _, entry = heapq.heappop(self._expiries)
            key = entry[3]
            if self._entries.get(key) == entry:
                self._push(key, self._rerank(key, now), entry[2])

    def _push(self, key: K, rank: EvictionRank, stamp: int) -> None:
        entry = (rank.level, rank.until, stamp, key)
        self._entries[key] = entry
        if key not in self._blocked:
            heapq.heappush(self._heap, entry)
        if 0 < rank.until < inf:
            heapq.heappush(self._expiries, (rank.until, entry))
        if len(self._heap) + len(self._expiries) > 4 * len(self._entries) + SLACK:
            self._compact()

    def _lowest(self) -> Entry[K] | None:
        """Return the lowest entry that is not blocked; None if there is none."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._unclaimed:
            return self._heap[0] if self._heap else None
        key = next(iter(self._unclaimed))
        entry = (*UNCLAIMED, self._unclaimed[key], key)
        return min(entry, self._heap[0]) if self._heap else entry

    def _is_valid(self, entry: Entry[K]) -> bool:
        key = entry[3]
        return self._entries.get(key) == entry and key not in self._blocked

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_valid(entry)]
        self._expiries = [end for end in self._expiries if self._entries.get(end[1][3]) == end[1]]
        heapq.heapify(self._heap)
        heapq.heapify(self._expiries)
