"""The cheapest fleet that keeps promises for a workload, by simulation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from kvmesh.planner.core.fleets import Bounds, Counts, efficient_fleets
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.workload.model import Workload

STEADY = 0.25, 0.85  # the part of the arrivals that counts, as shares of their number
ENDED = 0.92  # of the requests: the rest waits for people, or is late beyond doubt
# A fleet twice as large that raises no share by HELPS, and lowers no latency by FASTER, shows that
# none is enough.
HELPS = 0.005
FASTER = 0.1
BATCH = 16  # stands for the balance of prefill and decode


@dataclass(frozen=True)
class WorkerKind:
    """A kind of worker that can be had, up to `most` of it."""

    name: str
    options: WorkerOptions
    most: int


@dataclass(frozen=True)
class SizedFleet:
    """A simulated fleet: workers of each kind, cost per hour, share of requests by promise.

    `quantiles` are the promised ones in seconds, infinite if too few requests were served.
    """

    counts: Counts
    cost: float
    shares: tuple[float, ...]
    quantiles: tuple[float, ...]
    keeps: bool


def size_fleet(
    workload: Workload,
    kinds: Sequence[WorkerKind],
    promises: Sequence[Promise],
    options: SimulationOptions,
    tried: Callable[[SizedFleet], None] = lambda _: None,
    below: float = inf,
) -> SizedFleet | None:
    """The cheapest fleet that keeps all promises, by bisection; None if more workers do not help.

    Only fleets that cost less than `below` count. Capacities are compared by the speed of the
    kinds. `tried` receives each simulated fleet.
    """
    pools = [Pool(kind.name, max=kind.most, cost=kind.options.cost) for kind in kinds]
    speeds = relative_speeds(workload, kinds)
    none, most = tuple(0 for _ in kinds), tuple(kind.most for kind in kinds)
    fleets = [
        fleet
        for fleet in efficient_fleets(pools, speeds, Bounds(none, most))
        if sum(fleet) and _cost(kinds, fleet) < below
    ]
    found: SizedFleet | None = None
    low, high = 0, len(fleets) - 1
    before: SizedFleet | None = None
    for place in _growing(len(fleets)):
        result = simulate_fleet(workload, kinds, fleets[place], promises, options)
        tried(result)
        if result.keeps:
            found, high = result, place - 1
            break
        if before is not None and not _helps(before, result):
            return None
        before, low = result, place + 1
    while low <= high:
        middle = (low + high) // 2
        result = simulate_fleet(workload, kinds, fleets[middle], promises, options)
        tried(result)
        if result.keeps:
            found, high = result, middle - 1
        else:
            low = middle + 1
    return found


def relative_speeds(workload: Workload, kinds: Sequence[WorkerKind]) -> list[float]:
    """Requests of the workload that a worker of each kind serves per second, roughly.

    A request computes the tokens that its session has not had before.
    """
    held: dict[int, int] = {}
    new = output = kv = 0
    for round_ in workload.rounds:
        new += max(round_.input_tokens - held.get(round_.session, 0), 1)
        output += round_.output_tokens
        kv += round_.input_tokens
        held[round_.session] = round_.input_tokens + round_.output_tokens
    count = max(len(workload), 1)
    speeds = []
    for kind in kinds:
        core = kind.options.core
        total = core.blocks * core.limits.block_size
        load = DecodeLoad(BATCH, min(BATCH * kv // count, total), total)
        step = core.model.decode(load) / BATCH
        seconds = core.model.prefill(max(new // count, 1)) + output / count * step
        speeds.append(core.speedup / seconds)
    return speeds


def _cost(kinds: Sequence[WorkerKind], counts: Counts) -> float:
    return sum(n * kind.options.cost for n, kind in zip(counts, kinds, strict=True))


def _helps(small: SizedFleet, large: SizedFleet) -> bool:
    if any(b - a > HELPS for a, b in zip(small.shares, large.shares, strict=True)):
        return True
    pairs = zip(small.quantiles, large.quantiles, strict=True)
    return any(a == inf or b < (1 - FASTER) * a for a, b in pairs)


def _growing(count: int) -> Iterator[int]:
    """Places 0, 1, 3, 7 …, and the last one."""
    place = 0
    while place < count - 1:
        yield place
        place = 2 * place + 1
    if count:
        yield count - 1


def simulate_fleet(
    workload: Workload,
    kinds: Sequence[WorkerKind],
    counts: Counts,
    promises: Sequence[Promise],
    options: SimulationOptions,
) -> SizedFleet:
    """The shares of requests that keep each promise on one fleet."""
    fleet = tuple(
        replace(kind.options, count=count)
        for kind, count in zip(kinds, counts, strict=True)
        if count
    )
    options = replace(options, workers=fleet, ended_share=ENDED)
    records = Simulation(workload, options).run()
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
    generating = ~np.isnan(first) & np.isnan(records.column("ended"))
    shares, quantiles = [], []
    for promise in promises:
        counted = steady[~generating[steady]] if promise.metric == "itl" else steady
        reached = np.where(served & ~np.isnan(values[promise.metric]), values[promise.metric], inf)
        reached = reached[counted] if len(counted) else np.zeros(1)
        shares.append(float(np.mean(reached <= promise.seconds)))
        quantiles.append(float(np.quantile(reached, promise.quantile, method="higher")))
    keeps = all(s >= p.quantile for s, p in zip(shares, promises, strict=True))
    return SizedFleet(counts, _cost(kinds, counts), tuple(shares), tuple(quantiles), keeps)
