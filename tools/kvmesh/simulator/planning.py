"""The live planner as the autoscaler of a simulation."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_card

from kvmesh.bus.messages import (
    Instance,
    Load,
    Promote,
    RouteEvent,
    SeqEvent,
    Serve,
    Sleep,
    WorkerState,
)
from kvmesh.planner.actions import Decided, Observation, ScaleFleet, Unplanned, WorkerCommand
from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.core.groups.candidates import Plan
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pools import LABEL, Pool
from kvmesh.planner.fleet_planner import FleetPlanner
from kvmesh.planner.models import ModelPlanners
from kvmesh.runtime.warnings import Warnings
from kvmesh.simulator.autoscaler import FleetTarget
from kvmesh.simulator.fleet import MODEL


class SimulatedPlanner:
    """Passes the simulated messages to a planner; `pools` are the groups in order.

    `plans` are those that changed something, with their times.
    """

    def __init__(self, options: PlanOptions, pools: Sequence[Pool]) -> None:
        pools = [replace(pool, model="") for pool in pools]
        self._models = ModelPlanners(options, pools, Warnings())
        self._fleet = FleetPlanner(self._models, pools)
        self._fleet.takes_over = False  # from nobody
        core = self._models.core(MODEL)
        assert core is not None
        self.core = core
        self.interval_s = options.interval_s
        self.plans: list[tuple[float, Plan]] = []
        self._names = [pool.name for pool in pools]
        self._home: dict[str, str] = {}  # the pool of a worker's group, by its name

    def on_worker(self, card: Instance, state: WorkerState, group: int, now: float) -> None:
        pool = self._names[group]
        self._models.on_worker(replace_card(card, labels={LABEL: pool}), state, now)
        self._home.setdefault(card.name, pool)
        if self._models.latest(card.name) is None:
            del self._home[card.name]

    def on_loads(self, loads: list[Load], now: float) -> None:
        for load in loads:
            self.core.on_load(load)

    def on_sequences(self, events: list[SeqEvent]) -> None:
        for event in events:
            self.core.on_sequence(event)

    def on_route(self, event: RouteEvent, now: float) -> None:
        self.core.on_route(event, now)

    def promote(self, now: float) -> list[str]:
        return [command.instance for command in self._fleet.promote(now)]

    def decide(self, now: float, wanted: Sequence[int]) -> FleetTarget:
        place = {
            pool: PoolState(count, tuple(n for n, home in self._home.items() if home == pool))
            for pool, count in zip(self._names, wanted, strict=True)
        }
        target = FleetTarget(list(wanted))
        for action in self._fleet.decide(Observation(now, place, idle_models=(MODEL,))):
            match action:
                case Unplanned(_, error):
                    raise error
                case Decided(_, plan, before) if plan.switches or plan.wanted != before:
                    self.plans.append((now, plan))
                case ScaleFleet(numbers, stop):
                    cards = [self._models.latest(name) for name in stop]
                    target.stop.extend(card.instance for card in cards if card is not None)
                    for pool, number in numbers.items():
                        target.counts[self._names.index(pool)] = number
                case WorkerCommand(_, pool, instance, _, Serve()):
                    target.switches[instance] = self._names.index(pool)
                case WorkerCommand(_, _, instance, _, Promote()):
                    target.promote.append(instance)
                case WorkerCommand(_, _, instance, _, order):
                    target.standby[instance] = isinstance(order, Sleep)
        return target
