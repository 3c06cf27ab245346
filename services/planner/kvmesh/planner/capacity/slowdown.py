"""The factor by which modelled workers are slower than their step times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

from kvmesh.planner.capacity.queueing import ModelledEngine, SlowedTimes

# Real workers that keep less than modelled by TOLERANCE and a standard error, with a fleet
# unchanged for SETTLED_S seconds, make the model slower; it recovers at each evaluation that does
# not show that. Those that keep as much more make it faster.
SETTLED_S = 60.0
TOLERANCE = 0.05
SLOWER = 1.2
RECOVERY = 1.02
MOST = 3.0
# Routers give up some balance for cache hits, which the model does not: it is no faster than so
# unless real workers are.
USUAL = 1.15
LEAST = 1.07


@dataclass(frozen=True)
class Comparison:
    """A promise's kept share of `count` requests, beside the modelled and the promised one."""

    kept: float
    count: int
    modelled: float
    promised: float

    @property
    def worse(self) -> bool:
        """True if chance alone would hardly make real workers look so slow."""
        expected = min(self.modelled, self.promised)
        return self.kept < expected - TOLERANCE - self._error(expected)

    @property
    def better(self) -> bool:
        """True if chance alone would hardly make real workers look so fast."""
        return self.kept > self.modelled + TOLERANCE + self._error(self.modelled)

    def _error(self, share: float) -> float:
        return sqrt(share * (1 - share) / max(self.count, 1))


class Slowdown:
    """Follows how much worse real workers are than modelled ones.

    The model knows neither imbalance between workers nor work that another pool should do.
    """

    def __init__(self) -> None:
        self.factor = self._least = USUAL
        self._ready: Sequence[int] = ()
        self._since = -inf

    def settled_since(self, ready: Sequence[int], now: float) -> float | None:
        """Time since which results count, for `ready` workers by pool; None before SETTLED_S."""
        if ready != self._ready:
            self._ready, self._since = ready, now
        if now - self._since < SETTLED_S or not any(ready):
            return None
        return max(self._since, now - 2 * SETTLED_S)

    def learn(self, comparisons: Sequence[Comparison]) -> None:
        """Slow the model down if any comparison is worse, else let it recover.

        After a slower factor, the fleet settles anew: the same requests show nothing twice.
        """
        if any(each.worse for each in comparisons):
            self._ready = ()
            self._least = USUAL
            self.factor = min(self.factor * SLOWER, MOST)
            return
        if any(each.better for each in comparisons):
            self._least = max(self._least / RECOVERY, LEAST)
        self.factor = max(self.factor / RECOVERY, self._least)

    def slowed(self, kind: ModelledEngine) -> ModelledEngine:
        """The engine as slow as it has shown."""
        return replace(kind, times=SlowedTimes(kind.times, self.factor))
