"""The core survives messages in odd order, repeated or malformed, and workers that never come."""

import math
from random import Random

import pytest
from support.planned_model import (
    START,
    LinearEngine,
    PlannedModel,
    decision,
    freed,
    outcome,
    placed,
    wait,
    worker_card,
)

from kvmesh.bus.messages import SeqEvent, SeqPrefilled, SeqProgress
from kvmesh.planner.core.groups.past_needs import MOST_NEEDS
from kvmesh.planner.core.starts import RETRY_S


def test_decisions_without_any_message() -> None:
    model = PlannedModel("workers:min=0")
    for _ in range(100):
        model.now += 5
        plan = model.decide()
    assert (plan.wanted, plan.stop, plan.reason) == ({"workers": 0}, [], "no change")
    assert (plan.level, plan.candidates) == (0.0, [])


def test_the_least_number_is_started_without_any_message() -> None:
    assert PlannedModel("workers:min=2").decide().wanted == {"workers": 2}


def test_requests_that_wait_without_any_worker_start_one() -> None:
    model = PlannedModel("workers:min=0")
    for number in range(100):
        model.now += 0.5
        model.core.on_sequence(wait(f"r-{number}", model.now))
        model.core.on_sequence(wait(f"r-{number}", model.now))
    assert model.decide().wanted == {"workers": 1}
    assert model.core.traffic.waiting == 100
    model.run(60)
    assert model.workers["workers"] == ["w-0"]


def test_workers_of_unknown_speed_leave_the_number_as_it_is() -> None:
    model = PlannedModel("workers:max=16")
    for number in range(3):
        model.core.joined(worker_card(f"w-{number}"), "workers", model.now)
    model.wanted["workers"] = 3
    model.run(300, 2.0)
    assert set(model.sizes) == {3}


def test_a_waking_model_is_not_kept_waiting() -> None:
    model = PlannedModel("workers:min=0", interval_s=5.0)
    model.start("workers", 1)
    model.run(100, 0.2)
    model.run(500)
    assert model.sizes[-1] == 0
    assert model.changes(model.now - 60) == 0
    model.core.wake(3, model.now)
    model.now += 5
    assert model.decide().wanted == {"workers": 1}
    model.run(200)
    assert model.sizes[-1] == 1
    model.run(300)
    assert model.sizes[-1] == 0
    assert model.changes(START) == 3  # no oscillation around zero


def test_sparse_requests_do_not_wake_a_model_that_has_gone_idle() -> None:
    model = PlannedModel("workers:min=0", interval_s=10.0)
    model.start("workers", 1)
    for _ in range(4):
        model.request()
        model.run(200)
    model.run(1500)
    assert model.sizes[-1] == 0
    assert model.changes() == 1


def test_the_cheapest_pool_that_can_start_a_worker_is_woken() -> None:
    pools = "spot:min=0,cost=0.3,devices=8", "workers:min=0", "dear:min=0,cost=9"
    model = PlannedModel(",".join(pools), max_devices=4.0)
    model.core.wake(1, model.now)
    assert model.decide().wanted == {"spot": 0, "workers": 1, "dear": 0}


def test_a_new_worker_is_not_stopped_before_its_first_request() -> None:
    model = PlannedModel("workers:min=0")
    model.start("workers", 1)
    model.run(200)
    assert model.sizes[-1] == 1
    model.run(200)
    assert model.sizes[-1] == 0


def test_a_load_that_vanishes_while_events_are_lost_lets_the_model_go_idle() -> None:
    model = PlannedModel("workers:min=0")
    model.start("workers", 1)
    model.core.on_sequence(wait("lost", model.now, deadline_s=400))
    model.run(390)
    assert model.sizes[-1] == 1
    model.run(100)
    assert model.sizes[-1] == 0


def test_workers_that_never_come_are_given_up_and_not_retried_at_once() -> None:
    model = PlannedModel("workers:max=16", interval_s=10.0)
    model.start("workers", 2)
    model.broken.add("workers")
    model.run(400, 3.0)
    view = model.core.pools[0]
    assert view.starts.failed > 0
    assert view.starts.blocked(model.now)
    assert (model.sizes[-1], view.starts.pending) == (2, 0)
    failed = view.starts.failed
    model.run(200, 3.0)
    assert (view.starts.failed, set(model.sizes[-20:])) == (failed, {2})
    model.broken.clear()
    model.now += RETRY_S
    model.run(100, 3.0)
    assert model.sizes[-1] > 2


def test_another_pool_grows_where_the_first_has_no_machines() -> None:
    pools = "spot:min=0,cost=0.5,max=16", "workers:min=0,max=16", "dear:min=0,cost=2,max=16"
    model = PlannedModel(",".join(pools), interval_s=10.0)
    model.start("spot", 1)
    model.broken.add("spot")
    model.run(400, 2.0)
    assert model.wanted["workers"] > 1
    assert model.wanted["dear"] == 0
    assert len(model.workers["spot"]) == model.wanted["spot"] <= 1


def test_a_change_by_hand_is_respected_for_its_time() -> None:
    model = PlannedModel("workers:max=16", interval_s=10.0, manual_hold_s=300.0)
    model.start("workers", 6)
    model.run(300, 2.5)
    assert model.sizes[-1] > 2
    model.wanted["workers"] = 1
    model.plans.clear()
    plan = model.decide()
    assert plan.reason == "workers was changed by hand"
    model.run(290, 2.5)
    assert set(model.sizes) == {1}
    model.run(60, 2.5)
    assert model.sizes[-1] > 2


def test_a_card_that_changes_its_role_moves_the_worker() -> None:
    model = PlannedModel("whole,dec:serves=decode,pre:serves=prefill")
    core = model.core
    core.joined(worker_card("a"), "whole", START)
    for pool, serves in (("pre", "prefill"), ("dec", "decode"), ("dec", "decode")):
        core.joined(worker_card("a", serves), pool, START + 5)
        assert [view.pool.name for view in core.pools if view.ready] == [pool]
    core.joined(worker_card("a", "decode", draining=True), "dec", START + 6)
    assert not any(view.ready for view in core.pools)
    core.left("a")
    core.left("a")
    assert not any(view.cards for view in core.pools)
    core.on_load(LinearEngine("a").load(prefill_tokens=10))
    assert sum(view.prefill_tokens for view in core.pools) == 0


def test_a_pool_that_serves_something_else_from_now_on_is_planned_as_such() -> None:
    model = PlannedModel("whole,other")
    changed = PlannedModel("whole,other:serves=prefill").pools[1]
    model.core.replace_options(model.core.options, {"other": changed})
    assert model.decide().wanted == {"whole": 1, "other": 1}


@pytest.mark.parametrize("jump", [-3600.0, -86_400.0, 3600.0, 86_400.0 * 400])
def test_a_jump_of_the_clock_stops_no_decision(jump: float) -> None:
    model = PlannedModel("workers:max=16", interval_s=10.0, startup_s=20.0)
    model.start("workers", 2)
    model.run(200, 0.5)
    model.now += jump
    model.run(200, 4.0)
    assert model.sizes[-1] > 5
    assert model.plans[-1][1].level == pytest.approx(4.0, rel=0.5)


@pytest.mark.parametrize("ahead", [3600.0, 1e9, math.inf, math.nan])
def test_a_router_with_a_wrong_clock_does_not_hide_the_load(ahead: float) -> None:
    model = PlannedModel("workers:max=16", interval_s=10.0)
    model.start("workers", 2)
    model.run(100, 1.0)
    for number in range(5):
        model.core.on_route(decision(f"x-{number}", model.now + ahead), model.now)
        model.core.on_sequence(wait(f"y-{number}", model.now + ahead))
    model.run(200, 1.0)
    assert model.plans[-1][1].level == pytest.approx(1.0, rel=0.4)


def test_random_events_break_nothing_and_stay_bounded() -> None:
    rng = Random(4)
    model = PlannedModel("whole:min=0,max=9,pre:serves=prefill,min=0", interval_s=5.0)
    core, names = model.core, [f"r-{n}" for n in range(40)]
    for _ in range(3000):
        model.now += rng.expovariate(4.0)
        name, at = rng.choice(names), model.now + rng.uniform(-50, 50)
        events: list[SeqEvent] = [
            wait(name, at, rng.randrange(10**6), rng.uniform(-5, 50)),
            placed(name),
            freed(name),
            SeqPrefilled(name),
            SeqProgress(name, 5),
        ]
        core.on_sequence(rng.choice(events))
        core.on_route(decision(name, at, rng.randrange(10**5), rng.randrange(2000)), at)
        core.on_route(outcome(name, at, rng.randrange(500), rng.random(), rng.randrange(10**5)), at)
        worker = f"w-{rng.randrange(5)}"
        serves, pool = rng.choice([("aggregated", "whole"), ("prefill", "pre")])
        if rng.random() < 0.1:
            core.joined(worker_card(worker, serves, rng.random() < 0.2), pool, model.now)
        if rng.random() < 0.05:
            core.left(worker)
        core.on_load(LinearEngine(worker).load())
        if rng.random() < 0.1:
            model.wanted[pool] = rng.randrange(9)
        if rng.random() < 0.05:
            model.decide()
            assert all(0 <= n <= 9 for n in model.wanted.values())
    assert all(len(group._needs._needs) <= MOST_NEEDS for group in core.groups)
    assert core.traffic.waiting <= len(names)
