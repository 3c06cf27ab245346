"""A planner that takes over goes on where the last one was, from its last record."""

import pytest
from support.planned_model import PlannedModel

from kvmesh.bus.messages import PoolPlan
from kvmesh.planner.actions import Decided
from kvmesh.planner.record import scaling_decision

HOLD_S = 900.0
POOLS = "workers:max=16"


def recorded(made: PlannedModel) -> dict[str, PoolPlan]:
    plan = made.decide()
    decided = Decided("m", plan, made.wanted, False, True)
    return scaling_decision(made.core, decided, "p-1", made.now).pools


def successor(before: PlannedModel, wanted: int, later: float = 10.0) -> PlannedModel:
    """Another planner of the same pools, `later` seconds after the record of `before`."""
    pools = recorded(before)
    made = PlannedModel(POOLS, startup_s=5.0, interval_s=10.0)
    made.now = before.now + later
    made.start("workers", wanted)
    made.wanted["workers"] = wanted
    for view in made.core.pools:
        view.assume(wanted, made.now)
    made.core.resumed(made.now, pools)
    return made


def test_a_change_by_hand_is_respected_by_the_next_planner() -> None:
    first = PlannedModel(POOLS, interval_s=10.0)
    first.start("workers", 2)
    first.decide()
    first.wanted["workers"] = 5
    first.decide()
    second = successor(first, 5)
    assert "changed by hand" in second.decide().reason
    second.run(HOLD_S - 100)
    assert set(second.sizes) == {5}
    second.run(600)
    assert second.sizes[-1] < 5


@pytest.mark.parametrize(("later", "sizes"), [(5.0, {4}), (100.0, {1})])
def test_the_cool_down_goes_on(later: float, sizes: set[int]) -> None:
    first = PlannedModel(POOLS, interval_s=10.0, window_s=100.0)
    first.start("workers", 4)
    first.core.groups[0].changed(first.now)
    second = successor(first, 4, later)
    second.core.options = first.core.options
    second.core.idle = lambda now: True  # type: ignore[method-assign]
    assert {second.decide().wanted["workers"]} == sizes


def test_learned_start_up_times_and_failed_starts_are_known() -> None:
    first = PlannedModel(POOLS, startup_s=70.0, interval_s=10.0)
    first.start("workers", 1)
    first.run(400, 4.0)
    view = first.core.pools[0]
    view.starts.begin(1, first.now - 10_000)
    assert view.starts.give_up(first.now)
    second = successor(first, first.wanted["workers"])
    starts = second.core.pools[0].starts
    assert starts.startup_s == pytest.approx(70.0, abs=10.0)
    assert starts.blocked(second.now)


def test_a_record_of_a_clock_that_was_ahead_counts_as_now() -> None:
    made = PlannedModel(POOLS, interval_s=10.0)
    made.start("workers", 1)
    ahead = PoolPlan(
        ready=1, starting=0, before=1, wanted=1, startup_s=5.0,
        manual_at=made.now + 1e6, changed_at=made.now + 1e6, blocked_at=made.now + 1e6,
    )  # fmt: skip
    made.core.resumed(made.now, {"workers": ahead})
    view = made.core.pools[0]
    assert view.manual_at == made.now
    assert not view.held(made.now + HOLD_S, HOLD_S)
    assert made.core.groups[0].changed_at == made.now
