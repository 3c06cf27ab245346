"""A fleet that knows the load in advance: the bound, and its workers as an autoscaler."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from planner_workloads import Scenario, engine

from kvmesh.bus.messages import Instance, Load, RouteEvent, SeqEvent
from kvmesh.planner.capacity.queueing import ModelledEngine, RequestShape, latencies
from kvmesh.planner.core.promises import Promise
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.autoscaler import FleetTarget
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.worker.engines.mock.core import CoreOptions

BOUND_S = 60.0  # interval of the clairvoyant
MOST = 64


class TrueTimes:
    """The step times of the simulated engine itself."""

    def __init__(self, core: CoreOptions) -> None:
        self._core = core
        self._total = core.blocks * core.limits.block_size

    def prefill(self, tokens: int) -> float:
        return self._core.model.prefill(tokens) / self._core.speedup

    def decode(self, sequences: int, tokens: float) -> float:
        load = DecodeLoad(sequences, int(tokens), self._total)
        return self._core.model.decode(load) / self._core.speedup


@dataclass(frozen=True)
class Clairvoyant:
    """The fewest workers of each minute of a scenario, and their hours, weighted by cost.

    In every minute it has the fewest workers with which the requests of that minute, known in
    advance with their cached tokens, keep both promises. Its workers need no time to start.
    """

    needs: Sequence[int]
    hours: float


def clairvoyant(scenario: Scenario, promises: list[Promise]) -> Clairvoyant:
    """Search the fewest workers of each minute."""
    fleet = (scenario.kinds or (WorkerOptions(1, engine()),))[0]
    count = max(scenario.statics, default=16)
    options = SimulationOptions(
        router=RouterSettings(policy="kv"),
        workers=(replace(fleet, count=count),),
        speed=scenario.speed,
    )
    simulation = Simulation(scenario.workload, options)
    records = simulation.run()
    core = fleet.core
    kind = ModelledEngine(
        TrueTimes(core),
        core.limits.max_batched_tokens,
        core.limits.max_sequences,
        core.blocks * core.limits.block_size,
    )
    shapes = sorted(
        (
            RequestShape(
                records.arrived[n],
                max(r.input_tokens - records.cached[n], 1),
                r.input_tokens,
                r.output_tokens,
            )
            for n, r in enumerate(scenario.workload.rounds)
        ),
        key=lambda shape: shape.at,
    )
    end = max(records.ended)
    needs: list[int] = []
    total = 0.0
    for minute in range(ceil(end / BOUND_S)):
        at = minute * BOUND_S
        around = [s for s in shapes if at - BOUND_S <= s.at < at + BOUND_S]
        least = _least(around, sum(shape.at < at for shape in around), kind, promises)
        needs.append(least)
        total += least * min(BOUND_S, end - at)
    return Clairvoyant(needs, total * fleet.cost / 3600)


def _least(
    shapes: list[RequestShape], first: int, kind: ModelledEngine, promises: list[Promise]
) -> int:
    """The fewest workers that keep the promises for the shapes from `first` on.

    Where MOST workers do not keep one, since a prompt is too long for it, the fewest that keep as
    much.
    """
    if len(shapes) == first:
        return 1
    start = shapes[0].at
    moved = [replace(shape, at=shape.at - start) for shape in shapes]
    best = _kept(moved, first, [kind] * MOST, promises)
    wanted = [min(p.quantile, share) for p, share in zip(promises, best, strict=True)]
    least = 1
    while least < MOST and any(
        share < goal
        for share, goal in zip(_kept(moved, first, [kind] * least, promises), wanted, strict=True)
    ):
        least += 1
    return least


def _kept(
    shapes: list[RequestShape], first: int, workers: list[ModelledEngine], promises: list[Promise]
) -> list[float]:
    found = latencies(shapes, workers)
    return [
        float(
            np.mean(
                np.array((found.ttft if p.metric == "ttft" else found.itl)[first:]) <= p.seconds
            )
        )
        for p in promises
    ]


@dataclass
class ToldInAdvance:
    """Has the workers of a clairvoyant, each started `startup_s` before its minute."""

    needs: Sequence[int]
    startup_s: float
    interval_s: float = 5.0

    def joined(self, card: Instance, group: int, now: float) -> None: ...

    def left(self, card: Instance) -> None: ...

    def on_loads(self, loads: list[Load], now: float) -> None: ...

    def on_sequences(self, events: list[SeqEvent]) -> None: ...

    def on_route(self, event: RouteEvent, now: float) -> None: ...

    def decide(self, now: float, wanted: Sequence[int]) -> FleetTarget | None:
        first = int(now // BOUND_S)
        last = int((now + self.startup_s + self.interval_s) // BOUND_S)
        count = max(self.needs[first : last + 1], default=1)
        return FleetTarget([count, *wanted[1:]]) if count != wanted[0] else None
