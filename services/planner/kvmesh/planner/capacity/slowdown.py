"""The factor by which modelled workers are slower than their step times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

from kvmesh.planner.capacity.queueing import ModelledEngine, SlowedTimes

# Real workers that keep less than modelled by TOLERANCE and a standard error, with a fleet
# unchanged for SETTLED_S seconds, make the model slower; it recovers at each evaluation that does
# not show that.
SETTLED_S = 60.0
TOLERANCE = 0.05
SLOWER = 1.2
RECOVERY = 1.02
MOST = 3.0
# Routers give up some balance for cache hits, which the model does not: it is never faster than so.
LEAST = 1.15


@dataclass(frozen=True)
class Comparison:
    """A promise's kept share of `count` requests, beside the modelled or promised one."""

    kept: float
    count: int
    modelled: float

    @property
    def worse(self) -> bool:
        """Whether chance alone would hardly make real workers look so slow."""
        error = sqrt(self.modelled * (1 - self.modelled) / max(self.count, 1))
        return self.kept < self.modelled - TOLERANCE - error


class Slowdown:
    """Follows how much worse real workers are than modelled ones.

    The model knows neither imbalance between workers nor work that another pool should do.
    """

    def __init__(self) -> None:
        self.factor = LEAST
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
        """Slow the model down if any comparison is worse; without any, recover.

        After a slower factor, the fleet settles anew: the same requests show nothing twice.
        """
        worse = any(each.worse for each in comparisons)
        if worse:
            self._ready = ()
        factor = self.factor * SLOWER if worse else self.factor / RECOVERY
        self.factor = min(max(factor, LEAST), MOST)

    def slowed(self, kind: ModelledEngine) -> ModelledEngine:
        """The engine as slow as it has shown."""
        return replace(kind, times=SlowedTimes(kind.times, self.factor))
