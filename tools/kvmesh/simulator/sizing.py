"""The cheapest fleet that keeps promises for a workload, by simulation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvmesh.planner.core.fleets import Bounds, Counts, efficient_fleets
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.workload.model import Workload

STEADY = 0.25, 0.9  # the part of the arrivals that counts, as shares of their number
HELPS = 0.005  # a fleet twice as large that raises no share by this shows that none is enough


@dataclass(frozen=True)
class WorkerKind:
    """A kind of worker that can be had, up to `most` of it."""

    name: str
    options: WorkerOptions
    most: int


@dataclass(frozen=True)
class SizedFleet:
    """A simulated fleet: workers of each kind, cost per hour, share of requests by promise."""

    counts: Counts
    cost: float
    shares: tuple[float, ...]
    keeps: bool


def size_fleet(
    workload: Workload,
    kinds: Sequence[WorkerKind],
    promises: Sequence[Promise],
    options: SimulationOptions,
    tried: Callable[[SizedFleet], None] = lambda _: None,
) -> SizedFleet | None:
    """The cheapest fleet that keeps all promises, by bisection; None if more workers do not help.

    Capacities are compared by the speed of the kinds. `tried` receives each simulated fleet.
    """
    pools = [Pool(kind.name, max=kind.most, cost=kind.options.cost) for kind in kinds]
    speeds = [kind.options.core.speedup for kind in kinds]
    none, most = tuple(0 for _ in kinds), tuple(kind.most for kind in kinds)
    fleets = [f for f in efficient_fleets(pools, speeds, Bounds(none, most)) if sum(f)]
    found: SizedFleet | None = None
    low, high = 0, len(fleets) - 1
    before: SizedFleet | None = None
    for place in _growing(len(fleets)):
        result = _simulate(workload, kinds, fleets[place], promises, options)
        tried(result)
        if result.keeps:
            found, high = result, place - 1
            break
        if before is not None and not _helps(before, result):
            return None
        before, low = result, place + 1
    while low <= high:
        middle = (low + high) // 2
        result = _simulate(workload, kinds, fleets[middle], promises, options)
        tried(result)
        if result.keeps:
            found, high = result, middle - 1
        else:
            low = middle + 1
    return found


def _helps(small: SizedFleet, large: SizedFleet) -> bool:
    return any(b - a > HELPS for a, b in zip(small.shares, large.shares, strict=True))


def _growing(count: int) -> Iterator[int]:
    """Places 0, 1, 3, 7 …, and the last one."""
    place = 0
    while place < count - 1:
        yield place
        place = 2 * place + 1
    yield count - 1


def _simulate(
    workload: Workload,
    kinds: Sequence[WorkerKind],
    counts: Counts,
    promises: Sequence[Promise],
    options: SimulationOptions,
) -> SizedFleet:
    fleet = tuple(
        replace(kind.options, count=count)
        for kind, count in zip(kinds, counts, strict=True)
        if count
    )
    records = Simulation(workload, replace(options, workers=fleet)).run()
    arrived = records.column("arrived")
    order = np.argsort(arrived)
    steady = order[int(len(order) * STEADY[0]) : max(int(len(order) * STEADY[1]), 1)]
    first, output = records.column("first_token"), records.column("output")
    values = {
        "ttft": first - arrived,
        "itl": (records.column("ended") - first) / np.maximum(output - 1, 1),
        "queue": records.column("placed") - arrived,
    }
    served = np.array([error is None for error in records.error], dtype=bool)
    shares = tuple(
        float(np.mean((served & (values[promise.metric] <= promise.seconds))[steady]))
        for promise in promises
    )
    keeps = all(s >= p.quantile for s, p in zip(shares, promises, strict=True))
    cost = sum(n * kind.options.cost for n, kind in zip(counts, kinds, strict=True))
    return SizedFleet(counts, cost, shares, keeps)
