"""A pool's workers, starts and numbers; the cache that a stop would lose."""

import math

from msgspec.structs import replace
from support.planned_model import START, LinearEngine, outcome, worker_card

from kvmesh.bus.messages import Phase
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.starts import (
    GIVE_UP,
    MOST_START_S,
    REMEMBERED,
    REPORTED_S,
    RETRY_S,
    ReportedStarts,
    Starts,
)
from kvmesh.planner.core.victims import MOST_HITS, WORTH_S, CacheWorth


def view(least: int = 0, most: int = 8) -> PoolView:
    return PoolView(Pool("p", min=least, max=most), 60.0)


def test_the_start_up_time_is_the_median_of_those_seen() -> None:
    starts = Starts(60.0)
    assert starts.startup_s == 60.0
    for took in (10.0, 500.0, 20.0):
        starts.begin(1, START)
        starts.ready(START + took)
    assert starts.startup_s == 20.0
    starts.ready(START)  # begun by no one
    assert (starts.startup_s, starts.pending) == (20.0, 0)
    for _ in range(3 * REMEMBERED):
        starts.begin(1, START)
        starts.ready(START - 5)  # a clock that was set back
    assert starts.startup_s == 0.1


def test_starts_are_given_up_after_three_times_the_start_up_time() -> None:
    starts = Starts(60.0)
    starts.begin(2, START)
    starts.begin(1, START + 100)
    assert starts.give_up(START + GIVE_UP * 60) == 0
    assert not starts.blocked(START + 180)
    assert starts.give_up(START + GIVE_UP * 60 + 1) == 2
    assert (starts.pending, starts.failed) == (1, 2)
    assert starts.blocked(START + 200)
    assert not starts.blocked(START + 181 + RETRY_S)
    starts.cancel(5)
    assert starts.pending == 0


def test_starts_that_workers_report_are_waited_for() -> None:
    starts, reported, late = Starts(60.0), ReportedStarts(), START + GIVE_UP * 60 + 1
    starts.begin(2, START)
    reported.heard("w-1", late - REPORTED_S - 1)  # has ended since
    reported.heard("w-2", late)
    assert starts.give_up(late, reported.count(late)) == 1
    assert starts.give_up(late, reported.count(late)) == 0
    ended = late + REPORTED_S + 1
    assert starts.give_up(ended, reported.count(ended)) == 1
    starts.begin(1, START)
    assert starts.give_up(START + MOST_START_S + 1, 1) == 1


def test_workers_that_were_starting_already_teach_nothing_but_what_their_cards_tell() -> None:
    one = view()
    one.observe_wanted(2, START)  # by whoever started this mesh
    one.joined(worker_card("w-0"), START + 3, begun=False)
    assert one.starts.startup_s == 60.0
    one.joined(replace(worker_card("w-1"), startup_s=240.0), START + 3, begun=False)
    assert (one.starts.startup_s, one.starts.pending) == (240.0, 0)
    one.joined(replace(worker_card("w-9"), startup_s=math.inf), START + 4, begun=False)
    assert one.starts.startup_s == MOST_START_S
    one.want(3, START + 10)
    one.joined(worker_card("w-2"), START + 110, begun=False)
    assert one.starts.startup_s == 100.0


def test_a_start_that_waited_for_nats_is_no_slow_start() -> None:
    one = view()
    phases = [Phase("imports", 70.0), Phase("weights", 20.0), Phase("registration", 900.0)]
    card = replace(worker_card("w-1"), startup_s=990.0, phases=phases)
    one.joined(card, START + 3, begun=False)
    assert one.starts.startup_s == 90.0


def test_a_worker_that_changes_its_role_is_none_of_those_that_start() -> None:
    one = view()
    one.observe_wanted(1, START)
    one.joined(worker_card("w-0"), START, begun=False)
    one.want(2, START)
    one.joined(worker_card("w-1"), START + 2, begun=True)
    assert (one.starts.startup_s, one.starts.pending) == (60.0, 1)


def test_a_start_that_usually_takes_a_second_may_take_half_a_minute() -> None:
    starts = Starts(1.0)
    starts.begin(1, START)
    assert starts.give_up(START + 29) == 0
    assert starts.give_up(START + 31) == 1


def test_a_change_by_someone_else_is_seen_once_and_held() -> None:
    one = view()
    assert not one.observe_wanted(2, START)  # the first number is nobody's change
    one.want(4, START)
    assert not one.observe_wanted(4, START + 5)
    assert one.observe_wanted(1, START + 10)
    assert not one.observe_wanted(1, START + 15)
    assert one.held(START + 100, 900)
    assert not one.held(START + 911, 900)
    assert (one.wanted, one.starts.pending) == (1, 1)  # the first observation began two starts


def test_starts_that_were_not_carried_out_are_forgotten() -> None:
    one = view()
    for step in range(50):
        one.want(4, START + step)
        one.assume(2, START)
    assert one.starts.pending <= 2
    assert not one.observe_wanted(2, START + 60)


def test_while_starts_fail_only_ready_workers_and_the_least_size_count() -> None:
    one = view(least=1)
    one.joined(worker_card("a"), START, begun=False)
    one.joined(worker_card("b", draining=True), START, begun=False)
    assert one.most(START) == 8
    one.want(3, START)
    assert one.give_up(START + 181, 900) == 2
    assert (one.wanted, one.most(START + 182)) == (1, 1)
    one.left("a")
    assert one.most(START + 182) == 1
    assert one.most(START + 182 + RETRY_S) == 8


def test_a_hold_by_hand_outlasts_a_start_that_fails() -> None:
    one = view()
    one.observe_wanted(0, START)
    one.observe_wanted(3, START)
    assert one.give_up(START + 500, 900) == 0
    assert one.wanted == 3
    assert one.give_up(START + 901, 900) == 3
    assert one.wanted == 0


def test_a_draining_worker_is_neither_started_nor_wanted() -> None:
    one = view()
    one.starts.begin(1, START)
    one.joined(worker_card("a", draining=True), START + 1, begun=False)
    assert (one.ready, one.wanted, one.starts.pending) == ([], 0, 1)


def test_a_worker_that_leaves_takes_its_figures_along() -> None:
    one = view()
    assert one.kind() is None
    one.joined(worker_card("a"), START, begun=False)
    engine = LinearEngine("a")
    for _ in range(30):
        one.on_load(engine.load(prefill_tokens=700))
    kind = one.kind()
    assert kind is not None
    assert one.prefill_tokens == 700
    one.left("a")
    one.left("a")
    assert (one.prefill_tokens, one.cards) == (0, {})
    assert one.kind() == kind  # a later worker is expected to be alike


def test_the_worker_with_the_least_load_is_stopped_first() -> None:
    one = view()
    for name, running in (("a", 5), ("b", 1), ("c", 3)):
        one.joined(worker_card(name), START, begun=False)
        one.on_load(LinearEngine(name).load(running=running))
    assert one.stoppable == ["b", "c", "a"]


def test_the_worker_whose_cache_is_worth_least_is_stopped_first() -> None:
    worth = CacheWorth()
    for name, cached in (("a", 100), ("b", 5), ("a", 50), ("c", 60)):
        worth.served(outcome("r", START, cached=cached, worker=name), START)
    assert worth.least(["a", "b", "c", "new"], START) == ["new", "b", "c", "a"]
    assert worth.least(["c", "a"], START + WORTH_S + 1) == ["c", "a"]


def test_a_name_that_returns_starts_without_worth() -> None:
    worth = CacheWorth()
    worth.served(outcome("r", START, cached=1000, worker="a"), START)
    worth.left("a")
    worth.served(outcome("r", START + 300, cached=10, worker="a"), START + 300)
    worth.served(outcome("r", START + 300, cached=5, worker="b"), START + 300)
    assert worth.least(["a", "b"], START + WORTH_S + 1) == ["b", "a"]


def test_the_memory_of_hits_is_bounded() -> None:
    worth = CacheWorth()
    for number in range(MOST_HITS + 5000):
        worth.served(outcome("r", START, cached=1, worker=f"w-{number}"), START)
    assert len(worth._hits) <= MOST_HITS
    assert len(worth._worth) <= MOST_HITS
    worth.least([], math.inf)
    assert (len(worth._hits), len(worth._worth)) == (0, 0)


def test_a_worker_that_becomes_ready_ends_the_block() -> None:
    starts = Starts(10.0)
    starts.begin(1, 0.0)
    assert starts.give_up(31.0) == 1
    assert starts.blocked(32.0)
    starts.ready(40.0)
    assert not starts.blocked(41.0)
