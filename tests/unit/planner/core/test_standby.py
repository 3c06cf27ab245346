"""Workers of a pool on standby: promotions, their times, who falls asleep, and surplus workers."""

import pytest
from msgspec.structs import replace
from support.planned_model import START, worker_card
from support.standby import standby_card

from kvmesh.bus.messages import Instance, Phase, PoolPlan
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool, parse_pools, pool_of
from kvmesh.planner.core.standby import REFUSED_S, RISES_S, SURPLUS_S, Rises
from kvmesh.planner.core.starts import Starts
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.planner.record import pool_plan


def view(wanted: int, *parked: str, spare: int = 1) -> PoolView:
    made = PoolView(Pool("p", parked=spare), 60.0)
    made.observe_wanted(wanted, START)
    for number, name in enumerate(parked):
        made.standby.joined(standby_card(name, START - number))
    return made


def promoted(name: str, seconds: float, start: float = 90.0) -> Instance:
    phases = [Phase("imports", start - seconds), Phase("parked", 900.0), Phase("weights", seconds)]
    return replace(worker_card(name), startup_s=start, promoted_s=seconds, phases=phases)


def able(name: str) -> Instance:
    return replace(worker_card(name), sleeps=True)


def sleeping(wanted: int, most: int = 2, parked: int = 0) -> PoolView:
    made = PoolView(Pool("p", asleep=most, parked=parked), 60.0)
    made.observe_wanted(wanted, START)
    for number in range(wanted):
        made.joined(able(f"w-{number}"), START, begun=False)
    return made


def sleep(one: PoolView, instance: str, now: float) -> None:
    """A worker has done what it was told."""
    one.left(instance)
    one.standby.joined(standby_card(instance, now, asleep=True))


def test_the_one_that_waits_longest_is_promoted_where_one_is_missing() -> None:
    one = view(1, "new", "old")
    assert one.promote(START) == ["old"]
    assert one.promote(START + 1) == [], "it counts until it is ready"
    one.joined(promoted("old", 10.0), START + 10, begun=False)
    assert one.promote(START + 11) == []
    one.want(3, START + 12)
    assert one.promote(START + 12) == ["new"], "the other one that is missing is not parked yet"
    one.standby.cards["third"] = standby_card("third")
    assert one.promote(START + 13) == ["third"]


def test_a_worker_that_leaves_or_drains_is_replaced() -> None:
    one = view(2, "spare")
    for name in ("a", "b"):
        one.joined(worker_card(name), START, begun=False)
    assert one.promote(START) == []
    one.joined(replace(worker_card("a"), draining=True), START, begun=True)
    assert one.promote(START) == ["spare"]
    one.left("a")
    assert one.promote(START) == []


def test_a_pool_without_parked_workers_leaves_them_alone() -> None:
    assert view(1, "someone's", spare=0).promote(START) == []


def test_a_refused_promotion_is_tried_with_the_next_and_a_slow_one_is_given_up() -> None:
    one = view(1, "b", "a")
    assert one.promote(START) == ["a"]
    one.standby.not_promoted("a")
    one.standby.cards.pop("a")
    assert one.promote(START) == ["b"]
    one.standby.cards["c"] = standby_card("c")
    one.standby.cards.pop("b")
    late = START + 3 * 60 + 1
    assert one.promote(late - 2) == []
    assert one.promote(late) == ["c"]


def test_a_promoted_worker_that_fails_and_parks_again_is_missing_at_once() -> None:
    one = view(1)
    one.standby.joined(standby_card("w-0-1f", name="w-0"))
    assert one.promote(START) == ["w-0-1f"]
    one.standby.cards.clear()
    assert one.promote(START + 1) == []
    one.standby.joined(standby_card("w-0-2e", name="w-0"))
    assert one.promote(START + 2) == ["w-0-2e"]


def test_a_clock_that_is_set_back_ends_promotions() -> None:
    one = view(1, "b", "a")
    assert one.promote(START) == ["a"]
    one.standby.cards.pop("a")
    assert one.promote(START - 1000) == ["b"]


def test_a_promotion_teaches_both_times() -> None:
    one = view(1, "a")
    assert one.lag_s == 60.0, "none was seen"
    assert one.promote(START) == ["a"]
    assert one.lag_s == 60.0, "none is parked"
    one.standby.cards.pop("a")
    one.joined(promoted("a", 12.0), START + 12, begun=False)
    assert (one.starts.startup_s, one.starts.promotion_s) == (90.0, 12.0)
    assert one.starts.pending == 0
    assert one.lag_s == 90.0
    one.standby.cards["b"] = standby_card("b")
    assert one.lag_s == 12.0


def test_a_time_of_promotion_is_at_most_a_start_and_bounded() -> None:
    starts = Starts(60.0)
    starts.ready(START, 1.0, 1e9)
    assert starts.promotion_s == starts.startup_s == 3600.0
    starts.remember(50.0, 0.0, 5.0)
    assert Starts(60.0).promotion_s == 60.0


def test_another_planner_goes_on_with_what_was_learned() -> None:
    one = view(1, "a")
    plan = PoolPlan(ready=1, starting=0, before=1, wanted=1, startup_s=80.0, promotion_s=9.0)
    one.remember(plan, START)
    assert one.lag_s == 9.0


def test_ready_workers_that_stay_too_many_are_surplus() -> None:
    one = view(1)
    for name in ("a", "b", "c"):
        one.joined(worker_card(name), START, begun=False)
    assert one.surplus(START) == 0
    assert one.surplus(START + SURPLUS_S - 1) == 0
    assert one.surplus(START + SURPLUS_S) == 2
    assert one.surplus(START + SURPLUS_S + 1) == 0, "they have been told"
    one.joined(replace(worker_card("a"), draining=True), START, begun=True)
    one.left("b")
    assert one.surplus(START + 9 * SURPLUS_S) == 0


def test_while_starts_fail_parked_workers_can_still_be_added() -> None:
    one = view(1, "x", "y")
    one.want(4, START)
    assert one.give_up(START + 1000, 0) == 3 + 1
    assert one.most(START + 1000) == 2


def test_the_pool_of_a_parked_worker() -> None:
    pools = parse_pools(["one:model=x", "two:parked=2,model=m"])
    found = pool_of(standby_card("a"), pools)
    assert found is pools[1]
    assert found.parked == 2


def test_rises_count_within_one_start_only_and_for_some_hours() -> None:
    rises = Rises()
    assert rises.most(60.0) == 0
    for at, wanted in ((0, 2), (10, 4), (50, 5), (200, 6), (300, 1), (301, 3)):
        rises.note(wanted, START + at)
    assert rises.most(60.0) == 3, "from 2 to 5"
    assert rises.most(5.0) == 2
    assert rises.most(400.0) == 4, "from 2 to 6"
    rises.note(3, START + 301 + RISES_S + 1)
    assert rises.most(60.0) == 0


def test_the_record_says_what_waits_and_how_fast_the_pool_grew() -> None:
    one = view(1, "a", spare=2)
    for at, wanted in ((0, 1), (20, 4)):
        one.want(wanted, START + at)
        one.rises.note(one.wanted, START + at)
    plan = pool_plan(one, 1, START)
    assert (plan.parked, plan.may_wait, plan.rise) == (1, 2, 3)


def test_workers_sleep_up_to_the_bound_and_the_others_stop() -> None:
    one = sleeping(5)
    one.want(1, START + 100)
    stop = ["w-0", "w-1", "w-2", "w-3"]
    assert one.fall_asleep(stop, before=5, now=START + 100) == ["w-0", "w-1"]
    assert one.standby.asleep == 2
    one.want(0, START + 200)
    assert one.fall_asleep(["w-4"], before=1, now=START + 200) == []


def test_a_growing_pool_wakes_those_that_sleep_before_it_starts_any() -> None:
    one = sleeping(3)
    one.want(1, START)
    assert one.fall_asleep(["w-0", "w-1"], 3, START) == ["w-0", "w-1"]
    for name in ("w-0", "w-1"):
        sleep(one, name, START + 1)
    assert one.promote(START + 2) == []
    one.want(2, START + 10)
    assert one.fall_asleep([], 1, START + 10) == []
    assert one.standby.asleep == 1, "the place runs as many as before"
    assert one.promote(START + 10) == ["w-0"]
    one.want(5, START + 20)
    one.fall_asleep([], 2, START + 20)
    assert one.standby.asleep == 0, "the other two are started"
    assert one.promote(START + 20) == ["w-1"]


def test_those_asleep_are_promoted_before_those_parked() -> None:
    one = sleeping(1, parked=1)
    one.standby.joined(standby_card("early", START - 50))
    one.standby.joined(standby_card("late", START, asleep=True))
    assert one.standby.waiting == ["late", "early"]


def test_a_worker_that_refuses_counts_as_one_that_serves_and_may_stop() -> None:
    one = sleeping(2)
    one.want(1, START)
    assert one.fall_asleep(["w-0"], 2, START) == ["w-0"]
    one.stays_awake("w-0", START + 1)
    assert (one.wanted, one.standby.asleep) == (2, 0)
    assert not one.observe_wanted(2, START + 2), "nobody has set it by hand"
    one.want(1, START + 3)
    assert one.fall_asleep(["w-0"], 2, START + 3) == []
    one.want(2, START + 4)
    one.want(1, START + REFUSED_S + 2)
    assert one.fall_asleep(["w-0"], 2, START + REFUSED_S + 2) == ["w-0"]


def test_a_worker_that_cannot_leave_its_requests_is_not_told_to_sleep_again() -> None:
    one = sleeping(2)
    one.want(1, START)
    assert one.fall_asleep(["w-0"], 2, START) == ["w-0"]
    one.standby.tell("w-0")
    draining = replace(able("w-0"), draining=True)
    one.joined(draining, START + 1, begun=True)
    assert (one.wanted, one.standby.asleep) == (1, 1)
    one.joined(able("w-0"), START + 30, begun=True)
    assert (one.wanted, one.standby.asleep) == (2, 0)
    one.want(1, START + 31)
    assert one.fall_asleep(["w-0"], 2, START + 31) == []


def test_an_end_of_draining_that_nobody_here_has_asked_for_changes_nothing() -> None:
    one = sleeping(3)
    one.want(1, START)
    assert one.fall_asleep(["w-0"], 2, START) == ["w-0"]
    one.joined(replace(able("w-1"), draining=True), START + 1, begun=True)
    one.joined(able("w-1"), START + 2, begun=True)
    assert (one.wanted, one.standby.asleep) == (1, 1)


def test_a_worker_that_stays_awake_counts_only_beside_those_asleep() -> None:
    one = sleeping(3)
    one.want(1, START)
    assert one.fall_asleep(["w-0", "w-1"], 3, START) == ["w-0", "w-1"]
    for name in ("w-0", "w-1"):
        one.standby.tell(name)
    one.want(2, START + 5)
    assert one.fall_asleep([], 1, START + 5) == []
    sleep(one, "w-0", START + 6)
    one.stays_awake("w-1", START + 7)
    assert (one.wanted, one.standby.asleep) == (2, 1)


def test_a_worker_that_cannot_sleep_stops() -> None:
    one = sleeping(1)
    one.joined(worker_card("old"), START, begun=False)
    one.observe_wanted(2, START)
    one.want(1, START)
    assert one.fall_asleep(["old"], 2, START) == []


def test_pools_that_exchange_workers_let_none_sleep() -> None:
    assert parse_pools(["a:asleep=3"])[0].asleep == 3
    with pytest.raises(PlannerConfigError, match="remove asleep"):
        parse_pools(["a:kind=gpu,asleep=1"])
