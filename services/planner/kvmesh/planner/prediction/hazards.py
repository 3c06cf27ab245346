"""Distributions of the time until a session returns, learned as hazards per bin of idle time.

The Kaplan-Meier estimate on log-spaced bins, with decayed counts: of the sessions that were idle as
long as a bin's start, the share that returned within the bin. A session that has not returned yet
counts in the bins that it has passed, and half in the bin in which it leaves observation (the
actuarial estimate). Bins with few observations lean on the same bin of a wider group.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SHORTEST_S = 0.05
LONGEST_S = 86_400.0
PER_OCTAVE = 3
# Edges in seconds: bin 0 starts at 0, and each bin ends at its successor's edge.
EDGES: NDArray[np.float64] = np.concatenate(
    [
        [0.0],
        SHORTEST_S * 2 ** np.arange(0, np.log2(LONGEST_S / SHORTEST_S), 1 / PER_OCTAVE),
        [LONGEST_S],
    ]
)
BINS = len(EDGES) - 1
_EDGES: list[float] = EDGES.tolist()
# Prior of the widest group: a hazard, counted as so many observations.
PRIOR_HAZARD = 0.05
PRIOR_WEIGHT = 1.0
# Observations as which the wider group's hazard counts.
SHRINK = 8.0
# Ends of idle times after which an observation counts half.
HALF_LIFE = 4096
# The weight of new observations grows, instead of all others decaying; at this one all are scaled.
MOST_WEIGHT = 1e6


def bin_of(idle_s: float) -> int:
    """The bin of an idle time in seconds; `BINS` beyond the last one."""
    return bisect_right(_EDGES, idle_s) - 1


class HazardTable:
    """Decayed counts of returns and of observations in each bin of idle time, of one group."""

    def __init__(self) -> None:
        self._returns = [0.0] * BINS
        self._exposure = [0.0] * BINS
        self._weight = 1.0

    def passed(self, bins: Sequence[int]) -> None:
        """A session has stayed idle through these bins."""
        for each in bins:
            self._exposure[each] += self._weight

    def returned(self, bin_: int) -> None:
        """A session has returned in a bin."""
        self._exposure[bin_] += self._weight
        self._returns[bin_] += self._weight
        self._age()

    def left(self, bin_: int) -> None:
        """A session has left observation in a bin, without a return."""
        self._exposure[bin_] += self._weight / 2
        self._age()

    def hazards(self, wider: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """The chance to return within each bin, for a session idle at its start.

        `wider` are the hazards of a group that contains this one; None takes a constant prior.
        """
        returns = np.array(self._returns) / self._weight
        exposure = np.array(self._exposure) / self._weight
        if wider is None:
            total = PRIOR_HAZARD * PRIOR_WEIGHT + returns
            hazards: NDArray[np.float64] = total / (PRIOR_WEIGHT + exposure)
        else:
            hazards = (SHRINK * wider + returns) / (SHRINK + exposure)
        return hazards

    def _age(self) -> None:
        self._weight *= 2 ** (1 / HALF_LIFE)
        if self._weight > MOST_WEIGHT:
            self._returns = [each / self._weight for each in self._returns]
            self._exposure = [each / self._weight for each in self._exposure]
            self._weight = 1.0


class Survival:
    """The chances to stay idle, by the hazards of all bins: constant within each."""

    def __init__(self, hazards: NDArray[np.float64]) -> None:
        cumulative = np.cumsum(-np.log1p(-np.minimum(hazards, 1 - 1e-9)))
        self._cumulative = np.concatenate([[0.0], cumulative])

    def at(self, bin_: int) -> float:
        """The chance that a session stays idle until the start of a bin."""
        return float(np.exp(-self._cumulative[bin_]))

    def ever(self, bin_: int) -> float:
        """The chance that a session idle at the start of a bin returns at all."""
        return float(-np.expm1(self._cumulative[bin_] - self._cumulative[-1]))

    def returning(self, idle_s: NDArray[np.float64], horizon_s: float) -> NDArray[np.float64]:
        """The chances that sessions idle for so long return within the horizon, in seconds."""
        before = np.interp(idle_s, EDGES, self._cumulative)
        after = np.interp(idle_s + horizon_s, EDGES, self._cumulative)
        chances: NDArray[np.float64] = -np.expm1(before - after)
        return chances
