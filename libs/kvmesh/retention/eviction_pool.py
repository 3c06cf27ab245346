"""What nobody uses, in the order in which it is given up for something else.

Two structures: what nothing was asked for is in a list by recency, O(1) per operation; the rest in
a priority queue, O(log n). Both hold keys of any kind: blocks, or runs of them.

What others hang on (a block that has held blocks behind it) is not given up before those, whatever
it is worth by itself. So claims need not agree along a prefix, and may be raised and lowered at
any time.
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

    `carries` says whether something that is held hangs on a key: the owner then calls `uncover` as
    soon as nothing does. `renew` gives the standing of a key whose last one is past.
    """

    def __init__(
        self, carries: Callable[[K], bool], renew: Callable[[K, float], EvictionRank]
    ) -> None:
        self._carries = carries
        self._renew = renew
        self._stamps = count()
        self._plain: OrderedDict[K, int] = OrderedDict()
        self._entries: dict[K, Entry[K]] = {}
        self._heap: list[Entry[K]] = []
        self._ends: list[tuple[float, Entry[K]]] = []
        self._covered: set[K] = set()

    def __len__(self) -> int:
        return len(self._plain) + len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._plain or key in self._entries

    def add(self, key: K, standing: EvictionRank = UNCLAIMED) -> None:
        """Insert a key that is not here, as the most recently used."""
        stamp = next(self._stamps)
        if standing == UNCLAIMED:
            self._plain[key] = stamp
        else:
            self._file(key, standing, stamp)

    def discard(self, key: K) -> None:
        """Take out a key if it is here."""
        if self._plain.pop(key, None) is None and self._entries.pop(key, None) is not None:
            self._covered.discard(key)

    def touch(self, keys: Iterable[K]) -> None:
        """Those of these keys that are here are the most recently used now, in this order.

        Nothing may be asked for them: whatever they were inserted with, they are plain now.
        """
        plain, stamps = self._plain, self._stamps
        for key in keys:
            if key in plain:
                plain[key] = next(stamps)
                plain.move_to_end(key)
            elif key in self._entries:
                self.discard(key)
                plain[key] = next(stamps)

    def standing(self, key: K) -> EvictionRank:
        """What a key was inserted with, or set to since; KeyError."""
        return UNCLAIMED if key in self._plain else EvictionRank(*self._entries[key][:2])

    def set(self, key: K, standing: EvictionRank) -> None:
        """Something else is asked for a key, which stays as recent as it was; KeyError."""
        if key in self._plain:
            if standing != UNCLAIMED:
                self._file(key, standing, self._plain.pop(key))
        else:
            self._file(key, standing, self._entries[key][2])

    def first(self, now: float) -> K:
        """The key to give up first; IndexError if there is none."""
        self.expire(now)
        while True:
            entry = self._lowest()
            key = entry[3]
            if not self._carries(key):
                return key
            self._plain.pop(key, None)
            self._entries[key] = entry
            self._covered.add(key)

    def uncover(self, key: K) -> None:
        """Nothing hangs on a key any more; it may be one that is not here."""
        if key in self._covered:
            self._covered.remove(key)
            heapq.heappush(self._heap, self._entries[key])

    def expire(self, now: float) -> None:
        """Renew the standings that have ended by `now`."""
        while self._ends and self._ends[0][0] <= now:
            _, entry = heapq.heappop(self._ends)
            key = entry[3]
            if self._entries.get(key) == entry:
                self._file(key, self._renew(key, now), entry[2])

    def _file(self, key: K, standing: EvictionRank, stamp: int) -> None:
        entry = (standing.level, standing.until, stamp, key)
        self._entries[key] = entry
        if key not in self._covered:
            heapq.heappush(self._heap, entry)
        if 0 < standing.until < inf:
            heapq.heappush(self._ends, (standing.until, entry))
        if len(self._heap) + len(self._ends) > 4 * len(self._entries) + SLACK:
            self._compact()

    def _lowest(self) -> Entry[K]:
        """The lowest entry that is not covered; IndexError if there is none."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._plain:
            return self._heap[0]
        key = next(iter(self._plain))
        entry = (*UNCLAIMED, self._plain[key], key)
        return min(entry, self._heap[0]) if self._heap else entry

    def _is_valid(self, entry: Entry[K]) -> bool:
        key = entry[3]
        return self._entries.get(key) == entry and key not in self._covered

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_valid(entry)]
        self._ends = [end for end in self._ends if self._entries.get(end[1][3]) == end[1]]
        heapq.heapify(self._heap)
        heapq.heapify(self._ends)
