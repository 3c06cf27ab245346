"""Candidate fleets evaluated on one scenario, and the plan that results."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.planner.capacity.queueing import ModelledEngine, RequestShape
from kvmesh.planner.core.fleets import Aim, Counts, Kept, fulfilment
from kvmesh.planner.core.groups.role_switches import PlannedSwitch
from kvmesh.planner.core.pools import Pool


@dataclass(frozen=True)
class Evaluated:
    """A candidate fleet with the shares of the promises that it would keep."""

    workers: dict[str, int]
    cost: float
    kept: Kept
    promises: tuple[str, ...]


@dataclass
class Plan:
    """The decision of one interval: workers wanted per pool, and the instances to stop first.

    `wanted` holds once the workers of `switches` have changed their roles; those of `sleep` sleep.
    `level` and `forecast` are arrivals per second, now and when workers started now are ready.
    """

    wanted: dict[str, int]
    stop: list[str]
    reason: str
    level: float
    forecast: float
    candidates: list[Evaluated]
    switches: list[PlannedSwitch] = field(default_factory=list)
    sleep: list[str] = field(default_factory=list)


class CandidateFleets:
    """Evaluates candidate fleets on one scenario, each once."""

    def __init__(
        self,
        shapes: Sequence[RequestShape],
        kinds: Sequence[ModelledEngine],
        aimed: Sequence[Aim],
    ) -> None:
        self._shapes = shapes
        self._kinds = kinds
        self._aims = aimed
        self._known: dict[Counts, Kept] = {}

    def kept(self, counts: Counts) -> Kept:
        """The promises that a fleet would keep by the queue model."""
        kept = self._known.get(counts)
        if kept is None:
            workers = [k for k, n in zip(self._kinds, counts, strict=True) for _ in range(n)]
            kept = self._known[counts] = fulfilment(self._shapes, workers, self._aims)
        return kept

    def evaluated(self, pools: Sequence[Pool]) -> list[Evaluated]:
        """The fleets evaluated so far, smallest first."""
        promises = tuple(str(aim.promise) for aim in self._aims)
        return [
            Evaluated(
                {pool.name: n for pool, n in zip(pools, counts, strict=True)},
                sum(n * pool.cost for n, pool in zip(counts, pools, strict=True)),
                kept,
                promises,
            )
            for counts, kept in sorted(self._known.items())
        ]

    def smallest(self, fleets: list[Counts], margin: float) -> Counts:
        """The first of `fleets` that keeps all promises, by bisection; the last if none does.

        The search doubles its range first: large fleets take long to simulate.
        """
        low, high = 0, 1
        while high < len(fleets) and not self.keeps(fleets[high - 1], margin):
            low, high = high, 2 * high
        high = min(high, len(fleets)) - 1
        while low < high:
            middle = (low + high) // 2
            if self.keeps(fleets[middle], margin):
                high = middle
            else:
                low = middle + 1
        return fleets[low]

    def keeps(self, counts: Counts, margin: float) -> bool:
        """True if a fleet keeps each promise with `margin`, a share of what the promise leaves."""
        kept = self.kept(counts)
        return all(
            share >= aim.promise.quantile + margin * (1 - aim.promise.quantile)
            for share, aim in zip(kept.shares, self._aims, strict=True)
        )


def total_capacity(counts: Counts, speeds: Sequence[float]) -> float:
    """The capacity of a fleet in workers of the fastest pool."""
    return sum(n * speed for n, speed in zip(counts, speeds, strict=True))
