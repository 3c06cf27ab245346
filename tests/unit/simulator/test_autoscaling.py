"""Autoscalers of simulated fleets: start-ups, drains, device time, and the planner's core."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from kvmesh.bus.messages import Decision, Instance, Load, RouteEvent, SeqAdd, SeqEvent, WorkerState
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.autoscaler import FleetTarget
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import Fault, SimulationOptions, WorkerOptions
from kvmesh.simulator.planning import SimulatedPlanner
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

CORE = CoreOptions(8192, SchedulerLimits(block_size=64), speedup=0.03)


def requests(rate: Callable[[float], float], most: float, end: float, seed: int = 1) -> Workload:
    """Prompts of about 1,000 tokens without any common prefix, at a Poisson rate until `end`."""
    rng, tree, at = Random(seed), Tree(), 0.0
    rounds: list[Round] = []
    while (at := at + rng.expovariate(most)) < end:
        if rng.random() * most < rate(at):
            branch = tree.fork()
            rounds.append(
                Round(
                    session=len(rounds),
                    branch=branch,
                    output_branch=branch,
                    input_tokens=rng.randrange(500, 1500),
                    output_tokens=rng.randrange(5, 40),
                    at_s=at,
                )
            )
    return Workload(tree=tree, sessions=[Session(name=str(n)) for n in range(len(rounds))],
                    rounds=rounds)  # fmt: skip


def options(workers: Sequence[WorkerOptions], **more: object) -> SimulationOptions:
    base = SimulationOptions(router=RouterSettings(policy="kv"), workers=tuple(workers))
    return replace(base, **more)  # type: ignore[arg-type]


@dataclass
class Script:
    """Wants given numbers from given times on, and keeps what it receives."""

    steps: list[tuple[float, list[int]]]
    stop: list[str] = field(default_factory=list)
    interval_s: float = 10.0
    seen: list[object] = field(default_factory=list)
    cards: list[tuple[float, str, int, bool]] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    wanted: list[list[int]] = field(default_factory=list)

    def on_worker(self, card: Instance, state: WorkerState, group: int, now: float) -> None:
        if state is WorkerState.GONE:
            self.gone.append(card.instance)
        else:
            self.cards.append((now, card.instance, group, card.draining))

    def promote(self, now: float) -> list[str]:
        return []

    def on_loads(self, loads: list[Load], now: float) -> None:
        self.seen += loads

    def on_sequences(self, events: list[SeqEvent]) -> None:
        self.seen += events

    def on_route(self, event: RouteEvent, now: float) -> None:
        self.seen.append(event)

    def decide(self, now: float, wanted: Sequence[int]) -> FleetTarget:
        self.wanted.append(list(wanted))
        due = self.steps and now >= self.steps[0][0]
        return FleetTarget(self.steps.pop(0)[1] if due else list(wanted), self.stop)


def scripted(script: Script, *workers: WorkerOptions, **more: object) -> Simulation:
    chosen = options(workers, autoscaler=lambda: script, startup_s=30.0, **more)
    simulation = Simulation(requests(lambda _: 0.5, 0.5, 200.0), chosen)
    simulation.run()
    return simulation


def test_workers_start_and_drain_as_wanted() -> None:
    script = Script([(20.0, [3]), (100.0, [1])], stop=["worker-0.0"])
    simulation = scripted(script, WorkerOptions(1, CORE))
    joins = [(now, name) for now, name, _, draining in script.cards if not draining]
    drains = [(now, name) for now, name, _, draining in script.cards if draining]
    assert joins == [(0.0, "worker-0.0"), (50.0, "worker-1.0"), (50.0, "worker-2.0")]
    assert [now for now, _ in drains] == [100.0, 100.0]
    assert "worker-0.0" in script.gone
    assert len(script.gone) == 2
    assert not any(simulation.records.error)
    record = simulation.fleet.record
    assert (record.ups, record.downs) == (1, 1)
    least = 1 * simulation.clock.now + 2 * 80.0  # the two others occupy devices from 20 s on
    assert least <= record.device_s <= least + 120
    kinds = {type(each) for each in script.seen}
    assert {Load, SeqAdd, Decision} <= kinds


def test_a_cancelled_start_costs_until_then_at_the_price_of_its_group() -> None:
    script = Script([(20.0, [1, 1]), (30.0, [1, 0])])
    free, dear = WorkerOptions(1, CORE, cost=0.0), WorkerOptions(0, CORE, cost=7.0)
    simulation = scripted(script, free, dear)
    assert simulation.fleet.record.cost_s == pytest.approx(70.0)
    assert len(script.cards) == 1


def test_a_start_that_the_end_of_the_run_cuts_off_costs_too() -> None:
    script = Script([(190.0, [1, 1])])
    free, dear = WorkerOptions(1, CORE, cost=0.0), WorkerOptions(0, CORE, cost=7.0)
    simulation = scripted(script, free, dear)
    ended = simulation.clock.now
    assert ended < 220
    assert simulation.fleet.record.cost_s == pytest.approx(7 * (ended - 190))


def test_groups_with_equal_options_are_kept_apart() -> None:
    script = Script([(20.0, [1, 2])])
    scripted(script, WorkerOptions(1, CORE), WorkerOptions(1, CORE))
    assert [group for _, _, group, _ in script.cards] == [0, 1, 1]
    assert script.wanted[-1] == [1, 2]


def test_a_dead_worker_is_replaced_and_never_missing_from_the_numbers() -> None:
    script = Script([])
    scripted(script, WorkerOptions(2, CORE), faults=(Fault(55.0, "die", 1),))
    assert script.gone == ["worker-1.0"]
    assert [now for now, *_ in script.cards] == [0.0, 0.0, 85.0]
    assert {tuple(each) for each in script.wanted} == {(2,)}


def planned(workload: Workload, ready: int = 1, **more: object) -> tuple[Simulation, list[int]]:
    chosen = PlanOptions(promises=[Promise("ttft", 0.9, 5.0)], interval_s=10.0, startup_s=30.0)
    planners: list[SimulatedPlanner] = []

    def make() -> SimulatedPlanner:
        planners.append(SimulatedPlanner(chosen, [Pool("workers", max=12)]))
        return planners[-1]

    simulation = Simulation(
        workload, options([WorkerOptions(ready, CORE)], autoscaler=make, startup_s=30.0, **more)
    )
    simulation.run()
    return simulation, [sum(plan.wanted.values()) for _, plan in planners[0].plans]


def test_the_planner_follows_a_burst_and_its_end() -> None:
    burst = requests(lambda at: 4.0 if 300 <= at < 600 else 0.4, 4.0, 1100.0)
    simulation, sizes = planned(burst)
    assert not any(simulation.records.error)
    assert max(sizes) >= 4
    assert sizes[-1] <= max(sizes) / 2
    assert simulation.fleet.record.ups <= 6


def test_a_flat_load_in_the_simulator_makes_no_oscillation() -> None:
    simulation, sizes = planned(requests(lambda _: 1.5, 1.5, 900.0), ready=3)
    assert len(sizes) <= 4
    assert not any(simulation.records.error)


def test_a_simulation_with_a_planner_is_deterministic() -> None:
    load = requests(lambda at: 0.5 + at / 200, 3.0, 300.0)
    runs = [planned(load) for _ in range(2)]
    assert runs[0][1] == runs[1][1]
    assert runs[0][0].records.ended == runs[1][0].records.ended


def test_a_worker_that_dies_is_no_change_by_hand() -> None:
    load = requests(lambda at: 0.4 if at < 300 else 4.0, 4.0, 500.0)
    _, sizes = planned(load, faults=(Fault(100.0, "die", 0),), ready=2)
    assert max(sizes) >= 4


def waiting(
    workload: Workload, group: WorkerOptions, pool: Pool, **more: object
) -> tuple[Simulation, SimulatedPlanner]:
    chosen = PlanOptions(promises=[Promise("ttft", 0.9, 5.0)], interval_s=10.0, startup_s=60.0)
    planner = SimulatedPlanner(chosen, [pool])
    simulation = Simulation(
        workload,
        options([group], autoscaler=lambda: planner, startup_s=60.0, promotion_s=10.0, **more),
    )
    simulation.run()
    assert not any(simulation.records.error)
    return simulation, planner


def first_growth(simulation: Simulation, began: float) -> float:
    """Seconds from a time until one more worker is ready than then."""
    before = [ready for at, ready, _ in simulation.fleet.record.sizes if at <= began][-1]
    grown = (at for at, ready, _ in simulation.fleet.record.sizes if at > began and ready > before)
    return next(grown) - began


def test_parked_workers_serve_after_a_promotion_and_hold_no_device_before() -> None:
    burst = requests(lambda at: 4.0 if 300 <= at < 600 else 0.4, 4.0, 800.0)
    plain, _ = waiting(burst, WorkerOptions(1, CORE), Pool("p", max=12))
    parked, planner = waiting(burst, WorkerOptions(1, CORE, parked=3), Pool("p", max=12, parked=3))
    assert first_growth(parked, 300.0) < first_growth(plain, 300.0) - 30.0
    record = parked.fleet.record
    assert record.promotions >= 3
    assert record.waited_s > 2 * 300.0, "three were parked before the burst"
    assert planner.core.pools[0].starts.promotion_s == 10.0
    late = [(each.records.column("first_token") - each.records.column("arrived") > 5.0).sum()
            for each in (plain, parked)]  # fmt: skip
    assert late[1] < 0.6 * late[0]


def test_sleeping_workers_wake_for_the_next_burst() -> None:
    def rate(at: float) -> float:
        return 4.0 if at % 700 < 200 else 0.3

    simulation, planner = waiting(
        requests(rate, 4.0, 900.0), WorkerOptions(4, CORE, sleeps=True), Pool("p", asleep=8)
    )
    record = simulation.fleet.record
    assert record.waited_s > 0
    assert record.promotions > 0
    assert planner.core.asleep["p"] <= 8
    slept = [instance for _, plan in planner.plans for instance in plan.sleep]
    assert slept
    assert len(simulation.fleet.wanted) == 1


def test_a_dead_worker_is_replaced_by_a_parked_one() -> None:
    simulation, _ = waiting(
        requests(lambda _: 0.5, 0.5, 300.0),
        WorkerOptions(2, CORE, parked=1),
        Pool("p", min=2, max=2, parked=1),
        faults=(Fault(55.0, "die", 1),),
    )
    ready = [(at, ready) for at, ready, _ in simulation.fleet.record.sizes if at >= 55.0]
    assert ready[0] == (55.0, 1)
    assert (65.0, 2) in ready, "after the time of a promotion"
    assert simulation.fleet.wanted == [3]
