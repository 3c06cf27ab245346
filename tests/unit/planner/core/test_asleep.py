"""Workers of a pool that sleep in place of being stopped."""

import pytest
from msgspec.structs import replace
from support.planned_model import START, worker_card

from kvmesh.bus.messages import Instance, Role
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.parked import REFUSED_S, SURPLUS_S
from kvmesh.planner.core.planner import PlannerCore
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool, parse_pools
from kvmesh.planner.errors import PlannerConfigError


def able(name: str) -> Instance:
    return replace(worker_card(name), sleeps=True)


def asleep_card(name: str, started: float = START) -> Instance:
    return Instance(
        instance=name, role=Role.PARKED, name=name, version="", started=started, parked_for="m",
        asleep=True,
    )  # fmt: skip


def view(wanted: int, most: int = 2, parked: int = 0) -> PoolView:
    made = PoolView(Pool("p", asleep=most, parked=parked), 60.0)
    made.observe_wanted(wanted, START)
    for number in range(wanted):
        made.joined(able(f"w-{number}"), START, begun=False)
    return made


def sleep(one: PoolView, instance: str, now: float) -> None:
    """A worker has done what it was told."""
    one.left(instance)
    one.parked.add(asleep_card(instance, now))


def test_workers_sleep_up_to_the_bound_and_the_others_stop() -> None:
    one = view(5)
    one.want(1, START + 100)
    stop = ["w-0", "w-1", "w-2", "w-3"]
    assert one.fall_asleep(stop, before=5, now=START + 100) == ["w-0", "w-1"]
    assert one.sleepers.count == 2
    one.want(0, START + 200)
    assert one.fall_asleep(["w-4"], before=1, now=START + 200) == []


def test_a_growing_pool_wakes_those_that_sleep_before_it_starts_any() -> None:
    one = view(3)
    one.want(1, START)
    assert one.fall_asleep(["w-0", "w-1"], 3, START) == ["w-0", "w-1"]
    for name in ("w-0", "w-1"):
        sleep(one, name, START + 1)
    assert one.promote(START + 2) == []
    one.want(2, START + 10)
    assert one.fall_asleep([], 1, START + 10) == []
    assert one.sleepers.count == 1, "the place runs as many as before"
    assert one.promote(START + 10) == ["w-0"]
    one.want(5, START + 20)
    one.fall_asleep([], 2, START + 20)
    assert one.sleepers.count == 0, "the other two are started"
    assert one.promote(START + 20) == ["w-1"]


def test_those_asleep_are_promoted_before_those_parked() -> None:
    one = view(1, parked=1)
    one.parked.add(replace(asleep_card("early", START - 50), asleep=False))
    one.parked.add(asleep_card("late", START))
    assert one.parked.waiting == ["late", "early"]


def test_a_worker_that_refuses_counts_as_one_that_serves_and_may_stop() -> None:
    one = view(2)
    one.want(1, START)
    assert one.fall_asleep(["w-0"], 2, START) == ["w-0"]
    one.stays_awake("w-0", START + 1)
    assert (one.wanted, one.sleepers.count) == (2, 0)
    assert not one.observe_wanted(2, START + 2), "nobody has set it by hand"
    one.want(1, START + 3)
    assert one.fall_asleep(["w-0"], 2, START + 3) == []
    one.want(2, START + 4)
    one.want(1, START + REFUSED_S + 2)
    assert one.fall_asleep(["w-0"], 2, START + REFUSED_S + 2) == ["w-0"]


def test_a_worker_that_cannot_leave_its_requests_is_not_told_to_sleep_again() -> None:
    one = view(2)
    one.want(1, START)
    assert one.fall_asleep(["w-0"], 2, START) == ["w-0"]
    one.sleepers.told.add("w-0")
    draining = replace(able("w-0"), draining=True)
    one.joined(draining, START + 1, begun=True)
    assert one.take_awake() == []
    one.joined(able("w-0"), START + 30, begun=True)
    assert (one.take_awake(), one.take_awake()) == (["w-0"], [])
    one.stays_awake("w-0", START + 30)
    assert (one.wanted, one.sleepers.count) == (2, 0)
    one.want(1, START + 31)
    assert one.fall_asleep(["w-0"], 2, START + 31) == []


def test_an_end_of_draining_that_nobody_here_has_asked_for_changes_nothing() -> None:
    one = view(3)
    one.want(1, START)
    assert one.fall_asleep(["w-0"], 2, START) == ["w-0"]
    one.joined(replace(able("w-1"), draining=True), START + 1, begun=True)
    one.joined(able("w-1"), START + 2, begun=True)
    assert one.take_awake() == []


def test_a_worker_that_stays_awake_counts_only_beside_those_asleep() -> None:
    one = view(3)
    one.want(1, START)
    assert one.fall_asleep(["w-0", "w-1"], 3, START) == ["w-0", "w-1"]
    one.sleepers.told.update(["w-0", "w-1"])
    one.want(2, START + 5)
    assert one.fall_asleep([], 1, START + 5) == []
    sleep(one, "w-0", START + 6)
    one.stays_awake("w-1", START + 7)
    assert (one.wanted, one.sleepers.count) == (2, 1)


def test_a_worker_that_cannot_sleep_stops() -> None:
    one = view(1)
    one.joined(worker_card("old"), START, begun=False)
    one.observe_wanted(2, START)
    one.want(1, START)
    assert one.fall_asleep(["old"], 2, START) == []


def core(pool: Pool, *cards: Instance) -> PlannerCore:
    made = PlannerCore(PlanOptions(), [pool])
    made.observe_wanted({"p": len(cards)}, START)
    for card in cards:
        made.joined(card, "p", START)
    return made


def test_a_worker_that_was_restarted_instead_of_sleeping_is_told_again() -> None:
    made = core(Pool("p", asleep=1), able("a"), able("b"))
    made.observe_wanted({"p": 1}, START + 1)
    made.restore_sleepers({"p": 1})
    assert made.surplus(START + 2) == []
    ((_, sleeps),) = made.surplus(START + 2 + SURPLUS_S)
    assert sleeps


def test_surplus_workers_that_cannot_sleep_drain_where_others_park() -> None:
    parking = core(Pool("p", parked=1), worker_card("a"), worker_card("b"))
    other = core(Pool("p", asleep=1), worker_card("a"), worker_card("b"))
    other.restore_sleepers({"p": 1})
    for made in (parking, other):
        made.observe_wanted({"p": 1}, START + 1)
        assert made.surplus(START + 2) == []
    ((_, sleeps),) = parking.surplus(START + 2 + SURPLUS_S)
    assert not sleeps
    assert other.surplus(START + 2 + SURPLUS_S) == []
    assert other.sleepers == {"p": 0}
    assert other.pools[0].wanted == 2, "it counts, and the next decision stops it"


def test_another_planner_takes_over_what_sleeps_within_its_own_bound() -> None:
    made = core(Pool("p", asleep=2), able("a"))
    made.restore_sleepers({"p": 5, "other": 1})
    assert made.sleepers == {"p": 2}
    made.restore_sleepers({})
    assert made.sleepers == {"p": 0}


def test_pools_that_exchange_workers_let_none_sleep() -> None:
    assert parse_pools(["a:asleep=3"])[0].asleep == 3
    with pytest.raises(PlannerConfigError, match="remove asleep"):
        parse_pools(["a:kind=gpu,asleep=1"])
