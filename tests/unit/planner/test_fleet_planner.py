"""The actions of a decision: a table of fleets, observations and what follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from support.planned_model import START, worker_card
from support.standby import standby_card

from kvmesh.bus.messages import (
    Drain,
    Instance,
    PoolPlan,
    Promote,
    ScalingDecision,
    Serve,
    Sleep,
    WorkerState,
)
from kvmesh.planner.actions import (
    Action,
    Decided,
    Observation,
    ScaleFleet,
    Unplanned,
    WorkerCommand,
)
from kvmesh.planner.connectors.interface import PoolState
from kvmesh.planner.core.groups.role_switches import PlannedSwitch
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pools import parse_pools
from kvmesh.planner.core.standby import SURPLUS_S
from kvmesh.planner.fleet_planner import RECORD_S, FleetPlanner
from kvmesh.planner.models import ModelPlanners
from kvmesh.runtime.warnings import Warnings

AT_ONCE = {"zero_after_s": 0.0, "down_cooldown_s": 0.0}
ROLES = "d:serves=decode,kind=x,max=1,p:serves=prefill,kind=x"
A, B, C = "a-0-1f", "b-0-1f", "c-0-1f"


def able(instance: str) -> Instance:
    return replace(named(instance), sleeps=True)


def named(instance: str, serves: str = "aggregated", model: str = "m") -> Instance:
    return replace(worker_card(instance, serves, model=model), name=instance[:3])


def parked(instance: str) -> Instance:
    return standby_card(instance, name=instance[:3])


class Fleet:
    """A planner of `pools` with the workers of some cards; `decide` takes a place's numbers."""

    def __init__(self, pools: str, *cards: Instance, **more: Any) -> None:
        parsed = parse_pools([pools])
        options = PlanOptions(interval_s=10.0, **more.pop("options", {}))
        self.warnings = Warnings()
        self.models = ModelPlanners(options, parsed, self.warnings)
        self.planner = FleetPlanner(self.models, parsed, "p-1", **more)
        self.now = START
        for card in cards:
            self.models.on_worker(card, card.state, self.now)

    def decide(
        self, place: Mapping[str, PoolState | int] | None, after: float = 10.0, **more: Any
    ) -> list[Action]:
        """The actions besides plans."""
        self.now += after
        pools = (
            None
            if place is None
            else {
                pool: PoolState(state) if isinstance(state, int) else state
                for pool, state in place.items()
            }
        )
        self.actions = self.planner.decide(Observation(self.now, pools, **more))
        self.plans = [each for each in self.actions if isinstance(each, Decided)]
        return [each for each in self.actions if not isinstance(each, Decided)]

    def card(self, card: Instance, state: WorkerState | None = None) -> None:
        self.models.on_worker(card, state or card.state, self.now)


@dataclass(frozen=True)
class Case:
    pools: str
    cards: list[Instance]
    place: Mapping[str, PoolState | int] | None
    actions: list[Action] = field(default_factory=list)
    planner: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)


def command(instance: str, order: Any, pool: str = "w") -> WorkerCommand:
    return WorkerCommand("m", pool, instance, instance[:3], order)


CASES = {
    "what is wanted runs": Case("w:min=2", [named(A), named(B)], {"w": 2}),
    "a pool below its least size grows": Case(
        "w:min=3", [named(A)], {"w": 1}, [ScaleFleet({"w": 3}, [])]
    ),
    "a pool above its bound shrinks": Case(
        "w:max=1", [named(A), named(B)], {"w": 2}, [ScaleFleet({"w": 1}, ["a-0"])]
    ),
    "a place that chooses is told no names": Case(
        "w:max=1", [named(A), named(B)], {"w": 2}, [ScaleFleet({"w": 1}, [])], {"chooses": False}
    ),
    "workers that start end before ready ones": Case(
        "w:max=1", [named(A), named(B)], {"w": PoolState(3, ("a-0", "b-0", "c-0"))},
        [ScaleFleet({"w": 1}, ["a-0", "c-0"])],
    ),
    "a place that does not reply is left alone": Case("w:min=3", [named(A)], None),
    "a change that has failed counts the workers present": Case(
        "w:min=1,max=1", [named(A)], {"w": 1}, seen={"failed": True}
    ),
    "those on standby run beside those that serve": Case(
        "w:min=2,parked=2", [named(A), named(B), parked(C)], {"w": 4}
    ),
    "the place starts them as well": Case(
        "w:min=2,parked=2", [named(A)], {"w": 1}, [ScaleFleet({"w": 4}, [])]
    ),
    "a missing worker is replaced by one on standby": Case(
        "w:min=2,parked=1", [named(A), parked(B)], {"w": 3}, [command(B, Promote())]
    ),
    "a worker sleeps in place of one that stops": Case(
        "w:min=1,max=1,asleep=1", [able(A), able(B)], {"w": 2},
        [command(A, Sleep()), ScaleFleet({"w": 2}, [])],
    ),
    "an advisory planner commands nobody": Case(
        "w:min=1,max=1,asleep=1,parked=1", [able(A), able(B), parked(C)], {"w": 3},
        [ScaleFleet({"w": 2}, [])], {"advisory": True},
    ),
    "the last worker stays until frontends know the model": Case(
        "w:min=0", [named(A)], {"w": 1}, planner={"options": AT_ONCE}
    ),
    "and leaves then": Case(
        "w:min=0", [named(A)], {"w": 1}, [ScaleFleet({"w": 0}, ["a-0"])],
        {"options": AT_ONCE}, {"idle_models": ("m",)},
    ),
    "a worker that changed its role leaves the pool that started it": Case(
        ROLES, [named(A, "decode"), named(B, "decode"), named(C, "prefill")],
        {"d": PoolState(1, ("b-0",)), "p": PoolState(2, ("a-0", "c-0"))},
        [ScaleFleet({"p": 1}, ["a-0"])],
    ),
    "a worker of another kind counts where it was started": Case(
        ROLES + ",o:serves=prefill", [named(A, "decode"), named(C, "prefill")],
        {"d": 0, "p": PoolState(1, ("c-0",)), "o": PoolState(1, ("a-0",))},
        [ScaleFleet({"d": 1}, [])],
    ),
    "a worker that serves what no pool does counts nowhere": Case(
        "d:serves=decode,kind=x,min=2,p:serves=prefill,kind=x",
        [named(B, "decode"), named(C, "prefill"), named(A)],
        {"d": PoolState(2, ("a-0", "b-0")), "p": PoolState(1, ("c-0",))},
        [ScaleFleet({"d": 3}, [])],
    ),
    "models share a budget of devices": Case(
        "w:min=2,model=m,v:min=1,model=n", [named(A), named(B, model="n")], {"w": 1, "v": 1},
        [ScaleFleet({"w": 2}, [])], {"options": {"max_devices": 3}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_decisions(case: Case) -> None:
    fleet = Fleet(case.pools, *case.cards, **case.planner)
    assert fleet.decide(case.place, **case.seen) == case.actions


def test_the_numbers_of_a_planner_before_are_no_change_by_hand() -> None:
    fleet = Fleet("w:max=9", named(A))
    fleet.decide({"w": 4})
    assert fleet.decide({"w": 4}) == []
    assert "by hand" not in fleet.plans[0].plan.reason
    fleet.decide({"w": 6})
    assert "changed by hand" in fleet.plans[0].plan.reason
    assert fleet.plans[0].due, "the next planner has to respect it"
    fleet.models.replace_options(PlanOptions(), parse_pools(["w:min=8,max=9"]))
    assert fleet.decide({"w": 6}) == []
    fleet.planner.stand_by()
    fleet.decide({"w": 3}, 1000.0)
    assert "by hand" not in fleet.plans[0].plan.reason


def test_a_plan_that_changes_nothing_is_recorded_now_and_then() -> None:
    fleet = Fleet("w:min=1", named(A))
    due = []
    for _ in range(int(4 * RECORD_S / 10)):
        fleet.decide({"w": 1})
        due.append(fleet.plans[0].due)
    assert due[0]
    assert due.count(True) == 2


def test_a_change_that_the_place_does_not_make_is_one_decision() -> None:
    fleet = Fleet("w:min=3", named(A))
    assert fleet.decide({"w": 1}) == [ScaleFleet({"w": 3}, [])]
    assert fleet.plans[0].changed
    assert fleet.decide({"w": 1}, failed=True) == [ScaleFleet({"w": 3}, [])]
    assert not fleet.plans[0].changed


def test_a_worker_on_standby_is_promoted_between_decisions_by_the_one_that_decides() -> None:
    fleet = Fleet("w:min=2,parked=1", named(A), named(B), parked(C))
    fleet.card(named(B), WorkerState.GONE)
    assert fleet.planner.promote(fleet.now) == [], "it knows no numbers of the place"
    fleet.card(named(B))
    fleet.decide({"w": 3})
    fleet.card(replace(named(B), draining=True))
    assert fleet.planner.promote(fleet.now) == [command(C, Promote())]
    assert fleet.planner.promote(fleet.now) == []
    fleet.planner.refused(command(C, Promote()), fleet.now)
    fleet.planner.stand_by()
    assert fleet.planner.promote(fleet.now) == []
    fleet.decide({"w": 3})
    assert command(C, Promote()) in fleet.actions


def test_a_worker_that_refuses_to_sleep_counts_and_stops_instead() -> None:
    fleet = Fleet("w:min=1,max=1,asleep=1", able(A), able(B))
    (asleep, _) = fleet.decide({"w": 2})
    assert asleep == command(A, Sleep())
    fleet.planner.refused(command(A, Sleep()), fleet.now)
    assert fleet.decide({"w": 2}) == [ScaleFleet({"w": 1}, ["a-0"])]
    assert fleet.plans[0].due


def test_another_planner_takes_over_the_number_that_sleeps() -> None:
    pool = PoolPlan(ready=1, starting=0, before=1, wanted=1, startup_s=9.0, asleep=5)
    record = ScalingDecision(
        model="m", time=START, planner="p-0", reason="", changed=True, pools={"w": pool},
        signals={}, kept={},
    )  # fmt: skip
    fleet = Fleet("w:min=1,asleep=1", able(A), replace(parked(B), asleep=True))
    fleet.planner.on_decision(record)
    assert fleet.decide({"w": 2}) == []
    core = fleet.models.cores["m"]
    assert (core.asleep, core.pools[0].wanted) == ({"w": 1}, 1)
    assert fleet.plans[0].plan.wanted == {"w": 1}


def test_workers_that_stay_too_many_sleep_or_restart_to_park() -> None:
    for pools, card, order in (
        ("w:max=1,asleep=1", able(B), Sleep()),
        ("w:max=1,parked=1", named(B), Drain()),
    ):
        fleet = Fleet(pools, replace(card, instance=A, name="a-0"))
        fleet.decide({"w": 2})
        fleet.models.cores["m"].restore_asleep({"w": 1})
        fleet.card(card)
        assert fleet.decide({"w": 2}) == []
        assert fleet.decide({"w": 2}, SURPLUS_S) in ([command(A, order)], [command(B, order)])


def test_surplus_workers_that_cannot_wait_count_and_may_stop() -> None:
    fleet = Fleet("w:max=1,asleep=1", named(A))
    fleet.decide({"w": 1})
    fleet.models.cores["m"].restore_asleep({"w": 1})
    fleet.card(named(B))
    assert fleet.decide({"w": 2}) == []
    assert fleet.decide({"w": 2}, SURPLUS_S) == []
    assert fleet.decide({"w": 2}) == [ScaleFleet({"w": 1}, ["a-0"])]


def test_a_switch_of_roles_needs_no_change_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = "d:serves=decode,kind=x,p:serves=prefill,kind=x"
    fleet = Fleet(pools, named(A, "decode"), named(B, "decode"), named(C, "prefill"))
    place = {"d": PoolState(2, ("a-0", "b-0")), "p": PoolState(1, ("c-0",))}
    assert fleet.decide(place) == []
    core = fleet.models.cores["m"]
    decide = core.decide

    def switching(now: float) -> Any:
        plan = decide(now)
        plan.switches.append(PlannedSwitch(A, "d", "p", "prefill"))
        core.moved("d", "p")
        plan.wanted = {"d": 1, "p": 2}
        return plan

    monkeypatch.setattr(core, "decide", switching)
    assert fleet.decide(place) == [command(A, Serve("prefill"), "p")]
    monkeypatch.undo()
    fleet.card(named(A, "prefill"))
    assert fleet.decide(place) == []
    assert "by hand" not in fleet.plans[0].plan.reason
    assert fleet.plans[0].plan.wanted == {"d": 1, "p": 2}
    fleet.card(named(A, "prefill"), WorkerState.GONE)
    fleet.card(replace(named(A, "decode"), instance="a-0-2e"))  # with its first role again
    assert fleet.decide(place) == []
    assert "by hand" not in fleet.plans[0].plan.reason
    assert fleet.plans[0].plan.wanted == {"d": 2, "p": 1}


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        ("w:model=m", "no pool of the planner serves n"),
        ("w", "n is not planned, since pool w serves another model"),
    ],
)
def test_a_worker_of_no_pool_is_left_alone(pools: str, reason: str) -> None:
    fleet = Fleet(pools, named(A), named(B, model="n"), named(C, model="n"))
    assert fleet.decide({"w": 1}) == []
    assert [each.model for each in fleet.plans] == ["m"]
    assert [text.startswith(reason) for text in fleet.warnings.texts] == [True]


def test_the_planner_of_one_model_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet("w:model=m,v:min=2,model=n", named(A), named(B, model="n"))
    error = ArithmeticError("no")

    def fail(now: float) -> None:
        raise error

    fleet.decide({"w": 1, "v": 2})
    monkeypatch.setattr(fleet.models.cores["m"], "decide", fail)
    assert fleet.decide({"w": 1, "v": 1}, failed=True) == [
        Unplanned("m", error),
        ScaleFleet({"v": 2}, []),
    ]
    assert [each.model for each in fleet.plans] == ["n"]
