"""Shadow caches: the hits that forecasts and recency would have, on a sample of conversations.

Two caches of the pool's size hold no blocks but their numbers by conversation. One evicts the ends
of conversations by recency, the other by the value of their forecasts. Forecasts are good enough to
be sent while the second has more hits.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf

from kvmesh.returns.rates import age_bin

MAX_CONVERSATIONS = 512
MEMORY_RETURNS = 2000  # returns over which hits fade to a third
LEAST_RETURNS = 30
LONGEST_USE_S = 1800.0  # later, a use without an end counts as lost
_HASHES = 1 << 64
_IN_USE: Sequence[float] = ()


class _Held:
    """Blocks of a conversation in both caches; without `values` it is in use."""

    __slots__ = ("by_recency", "by_value", "since", "values")

    def __init__(self) -> None:
        self.by_recency = 0
        self.by_value = 0
        self.since = 0.0
        self.values = _IN_USE

    def value(self, now: float) -> float:
        values = self.values
        if values is _IN_USE:
            return inf if now - self.since < LONGEST_USE_S else 0.0
        return values[age_bin(now - self.since)]


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
        self._by_recency = 0
        self._by_value = 0

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
            held = self._held[name] = _Held()
        self._held.move_to_end(name)
        held.values, held.since = _IN_USE, now
        self._by_recency += blocks - held.by_recency
        self._by_value += blocks - held.by_value
        held.by_recency = held.by_value = blocks
        self._evict(now)
        if len(self._held) > MAX_CONVERSATIONS:
            self._halve()

    def end_use(self, name: int, values: Sequence[float], now: float) -> None:
        """The use has ended: `values` by age are those of its forecast."""
        held = self._held.get(name)
        if held is not None:
            held.values, held.since = values, now

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
        if self._by_recency > room:
            for held in self._held.values():
                gone = min(held.by_recency, int(self._by_recency - room) + 1)
                held.by_recency -= gone
                self._by_recency -= gone
                if self._by_recency <= room:
                    break
        if self._by_value > room:
            order = sorted(self._held.values(), key=lambda held: held.value(now))
            for held in order:
                gone = min(held.by_value, int(self._by_value - room) + 1)
                held.by_value -= gone
                self._by_value -= gone
                if self._by_value <= room:
                    break
        for name in [n for n, held in self._held.items() if not held.by_value + held.by_recency]:
            del self._held[name]

    def _halve(self) -> None:
        self.share /= 2
        for name in [name for name in self._held if name >= self.share * _HASHES]:
            held = self._held.pop(name)
            self._by_recency -= held.by_recency
            self._by_value -= held.by_value
