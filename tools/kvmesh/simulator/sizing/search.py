"""The cheapest fleet that keeps promises, found with few simulations of the whole workload.

A part of the workload, which is cheap to simulate, says where to begin. The search then moves away
from there with growing steps until it has a fleet that keeps the promises and a cheaper one that
does not, and bisects between them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Protocol

from kvmesh.planner.core.fleets import Bounds, Counts, efficient_fleets
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.sizing.fleets import (
    SizedFleet,
    WorkerKind,
    fleet_cost,
    relative_speeds,
    simulate_fleet,
)
from kvmesh.workload.generate.scaling import ScalingError, scale_sessions
from kvmesh.workload.model import Workload

# A fleet twice as large that raises no share by HELPS, and lowers no latency by FASTER, shows that
# none is enough.
HELPS = 0.005
FASTER = 0.1
STEP = 0.06  # of the capacity: the first one away from a guess
DOUBLE = 1.0  # the largest step, and the only one without a guess
PART = 1 / 8  # of the requests, for a guess
FEW = 1500  # requests: at least in a part; so few need no guess


class Simulate(Protocol):
    """Simulates a fleet, as `simulate_fleet` does."""

    def __call__(
        self,
        workload: Workload,
        kinds: Sequence[WorkerKind],
        counts: Counts,
        promises: Sequence[Promise],
        options: SimulationOptions,
        *,
        whole: bool,
    ) -> SizedFleet: ...


def size_fleet(
    workload: Workload,
    kinds: Sequence[WorkerKind],
    promises: Sequence[Promise],
    options: SimulationOptions,
    tried: Callable[[SizedFleet], None] = lambda _: None,
    below: float = inf,
    near: Counts | None = None,
    simulate: Simulate = simulate_fleet,
) -> SizedFleet | None:
    """The cheapest fleet that keeps all promises; None if more workers do not help.

    Only fleets that cost less than `below` count. Capacities are compared by the speed of the
    kinds. `tried` receives each fleet that was simulated with the whole workload. The search begins
    at the capacity of `near`, or where a part of the workload suggests. This decides how long it
    takes, not what it finds, as long as a fleet with more capacity never keeps less.
    """
    pools = [Pool(kind.name, max=kind.most, cost=kind.options.cost) for kind in kinds]
    speeds = relative_speeds(workload, kinds)
    none, most = tuple(0 for _ in kinds), tuple(kind.most for kind in kinds)
    fleets = [
        fleet
        for fleet in efficient_fleets(pools, speeds, Bounds(none, most))
        if sum(fleet) and fleet_cost(kinds, fleet) < below
    ]
    capacities = [_capacity(fleet, speeds) for fleet in fleets]
    start, step = 0.0, DOUBLE
    if near is not None:
        start, step = _capacity(near, speeds), STEP
    elif len(workload) > FEW:
        share = max(PART, FEW / len(workload))
        with suppress(ScalingError):  # too few sessions for a part: begin with the smallest fleet
            part = scale_sessions(workload, share, seed=1)
            simulated: list[SizedFleet] = []
            found = size_fleet(part, kinds, promises, options, simulated.append, simulate=simulate)
            step = STEP if found else DOUBLE
            growth = _work(workload, kinds) / _work(part, kinds)
            start = growth * _needed(simulated, promises, speeds)
    to_end = step == DOUBLE or len(workload) <= FEW
    results: dict[int, SizedFleet] = {}
    evidence = _Evidence()

    def keeps(place: int) -> bool | None:
        whole = to_end or evidence.wanted(capacities[place])
        result = simulate(workload, kinds, fleets[place], promises, options, whole=whole)
        results[place] = result
        tried(result)
        if not any(each.keeps for each in results.values()) and evidence.hopeless(
            capacities[place], result
        ):
            return None
        return result.keeps

    place = first_keeping(capacities, keeps, start, step)
    return None if place is None else results[place]


def first_keeping(
    capacities: Sequence[float], keeps: Callable[[int], bool | None], start: float, step: float
) -> int | None:
    """The first place that keeps, if all later ones do; None if none does or `keeps` returns None.

    `capacities` ascend. The first place asked is the one with a capacity of about `start`. The next
    one differs from it by `step`, a share of its capacity, and each further one by twice as much as
    the one before, up to DOUBLE, until the answer is between two places.
    """
    low, high = -1, len(capacities)
    place = min(bisect_left(capacities, start * (1 - 1e-9)), high - 1)
    while low + 1 < high:
        kept = keeps(place)
        if kept is None:
            return None
        if kept:
            high = place
        else:
            low = place
        if high == len(capacities):
            wanted = capacities[place] * (1 + step)
            place = max(bisect_left(capacities, wanted * (1 - 1e-9)), low + 1)
            place = min(place, high - 1)
        elif low < 0:
            wanted = capacities[place] / (1 + step)
            place = max(min(bisect_right(capacities, wanted * (1 + 1e-9)) - 1, high - 1), 0)
        else:
            place = (low + high) // 2
        step = min(2 * step, DOUBLE)
    return high if high < len(capacities) else None


class _Evidence:
    """Fleets that failed, each at least twice as large as the one before it."""

    def __init__(self) -> None:
        self._first = inf  # the least capacity that failed
        self._last: tuple[float, SizedFleet] | None = None

    def wanted(self, capacity: float) -> bool:
        """True if a fleet of this capacity should be simulated to the end, to be compared."""
        return capacity >= 2 * self._first * (1 - 1e-9)

    def hopeless(self, capacity: float, failed: SizedFleet) -> bool:
        """True if a failed fleet is no better than one of half its size."""
        self._first = min(self._first, capacity)
        if failed.stopped:
            return False
        if self._last is None:
            self._last = capacity, failed
            return False
        before, smaller = self._last
        if capacity < 2 * before * (1 - 1e-9):
            return False
        self._last = capacity, failed
        return not _helps(smaller, failed)


def _needed(
    tried: Sequence[SizedFleet], promises: Sequence[Promise], speeds: Sequence[float]
) -> float:
    """The capacity that keeps the promises, between the fleets that do and those that do not.

    If none does, the largest that was tried: a search goes on with twice as much.
    """
    failed = [fleet for fleet in tried if not fleet.keeps]
    kept = [fleet for fleet in tried if fleet.keeps]
    low = max((_capacity(fleet.counts, speeds) for fleet in failed), default=0.0)
    if not kept:
        return low
    smallest = min(kept, key=lambda fleet: fleet.cost)
    high = _capacity(smallest.counts, speeds)
    if not failed:
        return high
    largest = max(failed, key=lambda fleet: fleet.cost)
    if largest.stopped:
        return (low + high) / 2
    part = max(
        (promise.quantile - a) / (b - a)
        for promise, a, b in zip(promises, largest.shares, smallest.shares, strict=True)
        if a < promise.quantile
    )
    return low + part * (high - low)


def _work(workload: Workload, kinds: Sequence[WorkerKind]) -> float:
    """Seconds that a worker of the first kind would work."""
    return len(workload) / relative_speeds(workload, kinds)[0]


def _capacity(counts: Sequence[float], speeds: Sequence[float]) -> float:
    return sum(count * speed for count, speed in zip(counts, speeds, strict=True))


def _helps(small: SizedFleet, large: SizedFleet) -> bool:
    if any(b - a > HELPS for a, b in zip(small.shares, large.shares, strict=True)):
        return True
    pairs = zip(small.quantiles, large.quantiles, strict=True)
    return any(a == inf or b < (1 - FASTER) * a for a, b in pairs)
