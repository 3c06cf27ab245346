"""Shadow caches: the hits that forecasts and recency would have, on a sample of conversations.

Two caches of the pool's size hold no blocks but their numbers by conversation. One evicts the ends
of conversations by recency, the other by the value of their forecasts. Forecasts are good enough to
be sent while the second has more hits.
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

from kvmesh.returns.rates import AGE_ENDS, age_bin

MAX_CONVERSATIONS = 512
MEMORY_RETURNS = 2000  # returns over which hits fade to a third
LEAST_RETURNS = 30
LONGEST_USE_S = 1800.0  # later, a use without an end counts as lost
_HASHES = 1 << 64
_IN_USE: Sequence[float] = ()


class _Held:
    """Blocks of a conversation in both caches; without `values` it is in use.

    `value` is the present one, which changes at `changes_at`. `used` is the number of its last use.
    """

    __slots__ = ("by_recency", "by_value", "changes_at", "name", "since", "used", "value", "values")

    def __init__(self, name: int) -> None:
        self.name = name
        self.by_recency = 0
        self.by_value = self.used = 0
        self.start(_IN_USE, 0.0)

    def start(self, values: Sequence[float], now: float) -> None:
        """Count the age from now on."""
        self.values, self.since = values, now
        self.value, self.changes_at = inf, now + (0.0 if values else LONGEST_USE_S)

    def grow_older(self, now: float) -> None:
        """Set the value to that of the present age."""
        if not self.values:
            self.value, self.changes_at = 0.0, inf
            return
        bin_ = age_bin(now - self.since)
        self.value, self.changes_at = self.values[bin_], self.since + AGE_ENDS[bin_]


class ShadowCaches:
    """`capacity` is that of the pool, in blocks; the caches have the sample's `share` of it.

    A conversation is named by a hash that is uniform over 64 bits. The sample shrinks by half when
    it has more than MAX_CONVERSATIONS with blocks. `hits_by_value`, `hits_by_recency` and `wanted`
    are blocks read again in the sample and fade with the number of returns.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.share = 1.0
        self.hits_by_value = 0.0
        self.hits_by_recency = 0.0
        self.wanted = 0.0
        self.returns = 0
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._recent: OrderedDict[int, _Held] = OrderedDict()  # those that recency holds
        self._by_recency = 0
        self._by_value = 0
        self._uses = 0
        # Heaps of the held ones by value, then the earliest used, and by the change of their value:
        # each with outdated entries
        self._values: list[tuple[float, int, _Held]] = []
        self._changes: list[tuple[float, int, _Held]] = []

    def __len__(self) -> int:
        """The conversations of the sample."""
        return len(self._held)

    @property
    def forecasts_win(self) -> bool:
        """Eviction by forecasts has more hits than by recency, on enough returns."""
        return self.returns >= LEAST_RETURNS and self.hits_by_value > self.hits_by_recency

    def use(self, name: int, shared: int, blocks: int, now: float) -> None:
        """A prompt of `blocks` blocks is computed; `shared` of them its conversation had before."""
        if name >= self.share * _HASHES or self.capacity <= 0:
            return
        held = self._held.get(name)
        if shared:
            self._count(held, shared)
        if held is None:
            held = self._held[name] = _Held(name)
        self._held.move_to_end(name)
        self._recent[name] = held
        self._recent.move_to_end(name)
        self._uses += 1
        held.used = self._uses
        held.start(_IN_USE, now)
        self._by_recency += blocks - held.by_recency
        self._by_value += blocks - held.by_value
        held.by_recency = held.by_value = blocks
        self._order(held)
        self._evict(now)
        self._drop_empty(held)
        if len(self._held) > MAX_CONVERSATIONS:
            self._halve()

    def end_use(self, name: int, values: Sequence[float], now: float) -> None:
        """The use has ended: `values` by age are those of its forecast."""
        held = self._held.get(name)
        if held is not None:
            held.start(values, now)
            self._order(held)

    def _count(self, held: _Held | None, shared: int) -> None:
        kept = 1.0 - 1.0 / MEMORY_RETURNS
        self.returns += 1
        self.wanted = kept * self.wanted + shared
        by_value = min(held.by_value, shared) if held is not None else 0
        by_recency = min(held.by_recency, shared) if held is not None else 0
        self.hits_by_value = kept * self.hits_by_value + by_value
        self.hits_by_recency = kept * self.hits_by_recency + by_recency

    def _evict(self, now: float) -> None:
        room = self.capacity * self.share
        while self._by_recency > room:
            held = next(iter(self._recent.values()))
            gone = min(held.by_recency, int(self._by_recency - room) + 1)
            held.by_recency -= gone
            self._by_recency -= gone
            self._drop_empty(held)
        if self._by_value <= room:
            return
        due = []
        while self._changes and self._changes[0][0] <= now:
            due.append(heappop(self._changes))
        for at, used, held in due:
            if held.by_value and (held.changes_at, held.used) == (at, used):
                held.grow_older(now)
                self._order(held)
        while self._by_value > room:
            value, used, held = self._values[0]
            if not held.by_value or (held.value, held.used) != (value, used):
                heappop(self._values)
                continue
            gone = min(held.by_value, int(self._by_value - room) + 1)
            held.by_value -= gone
            self._by_value -= gone
            self._drop_empty(held)

    def _order(self, held: _Held) -> None:
        """Note the value of a held one and the time of its change."""
        heappush(self._values, (held.value, held.used, held))
        heappush(self._changes, (held.changes_at, held.used, held))
        if len(self._values) + len(self._changes) > 16 * MAX_CONVERSATIONS:
            valued = [held for held in self._held.values() if held.by_value]
            self._values = [(each.value, each.used, each) for each in valued]
            self._changes = [(each.changes_at, each.used, each) for each in valued]
            heapify(self._values)
            heapify(self._changes)

    def _drop_empty(self, held: _Held) -> None:
        if not held.by_recency:
            self._recent.pop(held.name, None)
            if not held.by_value:
                self._held.pop(held.name, None)

    def _halve(self) -> None:
        self.share /= 2
        for name in [name for name in self._held if name >= self.share * _HASHES]:
            held = self._held.pop(name)
            self._recent.pop(name, None)
            self._by_recency -= held.by_recency
            self._by_value -= held.by_value
            held.by_value = 0
