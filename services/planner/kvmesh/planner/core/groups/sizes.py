"""Numbers of workers by pool, within bounds and by capacity."""

from collections.abc import Sequence
from math import ceil, inf

from kvmesh.planner.core.fleets import Bounds, Counts, efficient_fleets
from kvmesh.planner.core.groups.candidates import CandidateFleets, total_capacity
from kvmesh.planner.core.pools import Pool


def within_bounds(counts: Counts, pools: Sequence[Pool], devices: float) -> Counts:
    """The numbers within the bounds of their pools and `devices` in all, the dearest cut first."""
    bounded = [max(min(n, p.max), p.min) for n, p in zip(counts, pools, strict=True)]
    excess = sum(n * p.devices for n, p in zip(bounded, pools, strict=True)) - devices
    for place in sorted(range(len(pools)), key=lambda n: -pools[n].cost):
        if excess > 0:
            cut = min(bounded[place] - pools[place].min, ceil(excess / pools[place].devices))
            bounded[place] -= cut
            excess -= cut * pools[place].devices
    return tuple(bounded)


def least_awake(counts: Counts, pools: Sequence[Pool]) -> Counts:
    """The least sizes, with one of the present workers where all are 0."""
    target = [min(pool.min, n) for pool, n in zip(pools, counts, strict=True)]
    if any(counts) and not any(target):
        present = [place for place, count in enumerate(counts) if count]
        target[min(present, key=lambda place: pools[place].cost)] = 1
    return tuple(target)


def grown(
    counts: Counts, capacity: float, pools: Sequence[Pool], speeds: Sequence[float], bounds: Bounds
) -> Counts:
    """The cheapest growth to `capacity` within bounds, or the largest that they permit."""
    fleets = efficient_fleets(pools, speeds, bounds)
    enough = (fleet for fleet in fleets if total_capacity(fleet, speeds) >= capacity - 1e-9)
    return next(enough, fleets[-1] if fleets else counts)


def shrunk(
    counts: Counts,
    held: float,
    pools: Sequence[Pool],
    speeds: Sequence[float],
    least: Counts,
    model: CandidateFleets,
    margin: float,
) -> Counts:
    """A cheaper fleet of capacity `held` that keeps the promises with `margin`, else `counts`.

    It has at least `least` workers, and at least one.
    """
    below = tuple(min(low, have) for low, have in zip(least, counts, strict=True))
    fleets = efficient_fleets(pools, speeds, Bounds(below, counts, inf))
    fleets = [f for f in fleets if sum(f) and total_capacity(f, speeds) >= held - 1e-9]
    target = model.smallest(fleets, margin) if fleets else counts
    return target if _cost(target, pools) < _cost(counts, pools) else counts


def _cost(counts: Counts, pools: Sequence[Pool]) -> float:
    return sum(n * pool.cost for n, pool in zip(counts, pools, strict=True))
