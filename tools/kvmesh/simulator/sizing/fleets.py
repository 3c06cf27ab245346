"""Fleets of worker kinds that can be had, and how one of them serves a workload."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmesh.planner.core.fleets import Counts
from kvmesh.planner.core.promises import Promise
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.sizing.verdict import PromiseWatch
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.workload.model import Workload

ENDED = 0.92  # of the requests: the rest waits for people, or is late beyond doubt
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

    `quantiles` are the promised ones in seconds, infinite if too few requests were served. With
    `stopped`, the simulation ended once a promise was broken: shares are upper bounds then, and
    quantiles lower ones.
    """

    counts: Counts
    cost: float
    shares: tuple[float, ...]
    quantiles: tuple[float, ...]
    keeps: bool
    stopped: bool = False


def fleet_cost(kinds: Sequence[WorkerKind], counts: Counts) -> float:
    """The cost of a fleet per hour."""
    return sum(n * kind.options.cost for n, kind in zip(counts, kinds, strict=True))


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


def simulate_fleet(
    workload: Workload,
    kinds: Sequence[WorkerKind],
    counts: Counts,
    promises: Sequence[Promise],
    options: SimulationOptions,
    *,
    whole: bool = True,
) -> SizedFleet:
    """The shares of requests that keep each promise on one fleet.

    Without `whole`, the simulation stops as soon as a promise is certainly broken.
    """
    fleet = tuple(
        replace(kind.options, count=count)
        for kind, count in zip(kinds, counts, strict=True)
        if count
    )
    options = replace(options, workers=fleet, ended_share=ENDED)
    watch = PromiseWatch(promises, len(workload), whole)
    simulation = Simulation(workload, options, watch.round_ended)
    watch.look = lambda: (simulation.records, simulation.clock.now)
    watch.stop = simulation.clock.stop
    records = simulation.run()
    cost = fleet_cost(kinds, counts)
    if watch.broken is not None:
        shares, quantiles = watch.broken
        return SizedFleet(counts, cost, shares, quantiles, keeps=False, stopped=True)
    shares, quantiles = watch.outcome(records)
    keeps = all(s >= p.quantile for s, p in zip(shares, promises, strict=True))
    return SizedFleet(counts, cost, shares, quantiles, keeps)
