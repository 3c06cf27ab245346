"""Parked workers of a pool: promotions, the times that they teach, and surplus workers."""

from msgspec.structs import replace
from support.planned_model import START, worker_card

from kvmesh.bus.messages import Instance, Phase, PoolPlan, Role
from kvmesh.planner.core.parked import LEAST_PATIENCE_S, RISES_S, SURPLUS_S, Rises
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool, parse_pools, pool_of
from kvmesh.planner.core.starts import Starts
from kvmesh.planner.record import pool_plan


def parked_card(name: str, started: float = START) -> Instance:
    return Instance(
        instance=name, role=Role.PARKED, name=name, version="", started=started, parked_for="m"
    )


def view(wanted: int, *parked: str, spare: int = 1) -> PoolView:
    made = PoolView(Pool("p", parked=spare), 60.0)
    made.observe_wanted(wanted, START)
    for number, name in enumerate(parked):
        made.parked.cards[name] = parked_card(name, START - number)
    return made


def promoted(name: str, seconds: float, start: float = 90.0) -> Instance:
    phases = [Phase("imports", start - seconds), Phase("parked", 900.0), Phase("weights", seconds)]
    return replace(worker_card(name), startup_s=start, promoted_s=seconds, phases=phases)


def test_the_one_that_waits_longest_is_promoted_where_one_is_missing() -> None:
    one = view(1, "new", "old")
    assert one.promote(START) == ["old"]
    assert one.promote(START + 1) == [], "it counts until it is ready"
    one.parked.cards.pop("old")
    one.joined(promoted("old", 10.0), START + 10, begun=False)
    assert one.promote(START + 11) == []
    one.want(3, START + 12)
    assert one.promote(START + 12) == ["new"], "the other one that is missing is not parked yet"
    one.parked.cards["third"] = parked_card("third")
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
    one.parked.failed("a")
    one.parked.cards.pop("a")
    assert one.promote(START) == ["b"]
    one.parked.cards["c"] = parked_card("c")
    one.parked.cards.pop("b")
    late = START + 3 * 60 + 1
    assert one.promote(late - 2) == []
    assert one.promote(late) == ["c"]


def test_a_promoted_worker_that_fails_and_parks_again_is_missing_at_once() -> None:
    one = view(1)
    one.parked.add(replace(parked_card("w-0-1f"), name="w-0"))
    assert one.promote(START) == ["w-0-1f"]
    one.parked.cards.clear()
    assert one.promote(START + 1) == []
    one.parked.add(replace(parked_card("w-0-2e"), name="w-0"))
    assert one.promote(START + 2) == ["w-0-2e"]


def test_a_clock_that_is_set_back_ends_promotions() -> None:
    one = view(1, "b", "a")
    assert one.promote(START) == ["a"]
    one.parked.cards.pop("a")
    assert one.promote(START - 1000) == ["b"]


def test_a_promotion_teaches_both_times() -> None:
    one = view(1, "a")
    assert one.lag_s == 60.0, "none was seen"
    assert one.promote(START) == ["a"]
    assert one.lag_s == 60.0, "none is parked"
    one.parked.cards.pop("a")
    one.joined(promoted("a", 12.0), START + 12, begun=False)
    assert (one.starts.startup_s, one.starts.promotion_s) == (90.0, 12.0)
    assert one.starts.pending == 0
    assert one.lag_s == 90.0
    one.parked.cards["b"] = parked_card("b")
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
    assert LEAST_PATIENCE_S > 0


def test_while_starts_fail_parked_workers_can_still_be_added() -> None:
    one = view(1, "x", "y")
    one.want(4, START)
    assert one.give_up(START + 1000, 0) == 3 + 1
    assert one.most(START + 1000) == 2


def test_the_pool_of_a_parked_worker() -> None:
    pools = parse_pools(["one:model=x", "two:parked=2,model=m"])
    found = pool_of(parked_card("a"), pools)
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
