"""The live planner's core as the autoscaler of a simulation."""

from collections.abc import Sequence

from kvmesh.bus.messages import Instance, Load, RouteEvent, SeqEvent
from kvmesh.planner.core.groups.candidates import Plan
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.planner import PlannerCore
from kvmesh.planner.core.pools import Pool
from kvmesh.simulator.autoscaler import FleetTarget


class SimulatedPlanner:
    """Passes the simulated messages to the planner's core; `pools` are the groups in order."""

    def __init__(self, options: PlanOptions, pools: Sequence[Pool]) -> None:
        self.core = PlannerCore(options, pools)
        self.core.switches.able = lambda _: True
        self.interval_s = options.interval_s
        self.plans: list[tuple[float, Plan]] = []
        self._names = [pool.name for pool in pools]

    def joined(self, card: Instance, group: int, now: float) -> None:
        self.core.joined(card, self._names[group], now)

    def left(self, card: Instance) -> None:
        self.core.left(card.instance)

    def parked(self, card: Instance, group: int, now: float) -> None:
        self.core.parked(card, self._names[group])

    def unparked(self, instance: str) -> None:
        self.core.unparked(instance)

    def promote(self, now: float) -> list[str]:
        return [instance for instance, _ in self.core.promote(now)]

    def surplus(self, now: float) -> list[tuple[str, bool]]:
        return self.core.surplus(now)

    def on_loads(self, loads: list[Load], now: float) -> None:
        for load in loads:
            self.core.on_load(load)

    def on_sequences(self, events: list[SeqEvent]) -> None:
        for event in events:
            self.core.on_sequence(event)

    def on_route(self, event: RouteEvent, now: float) -> None:
        self.core.on_route(event, now)

    def decide(self, now: float, wanted: Sequence[int]) -> FleetTarget | None:
        serving = [n - waiting for n, waiting in zip(wanted, self._waiting(), strict=True)]
        self.core.observe_wanted(dict(zip(self._names, serving, strict=True)), now)
        plan = self.core.decide(now)
        numbers = [plan.wanted[name] for name in self._names]
        target = [n + waiting for n, waiting in zip(numbers, self._waiting(), strict=True)]
        if numbers == serving and not plan.switches:
            return None
        self.plans.append((now, plan))
        switches = {each.instance: self._names.index(each.target) for each in plan.switches}
        return FleetTarget(target, plan.stop, switches, plan.sleep)

    def _waiting(self) -> list[int]:
        """Workers of each group that the fleet runs beside those that serve."""
        asleep = self.core.sleepers
        return [view.pool.parked + asleep[view.pool.name] for view in self.core.pools]
