"""The fleet follows the load: steady under noise, fast upwards, downwards only after proof."""

from itertools import pairwise

import pytest
from support.planned_model import START, PlannedModel

from kvmesh.planner.core.promises import Promise

FAST = [Promise("ttft", 0.95, 2.0)]
LOOSE = [Promise("ttft", 0.95, 15.0)]


def planned(pools: str = "workers:max=32", ready: int = 2, **options: object) -> PlannedModel:
    model = PlannedModel(pools, **{"promises": FAST, "interval_s": 10.0, **options})  # type: ignore[arg-type]
    model.start(model.pools[0].name, ready)
    return model


@pytest.mark.parametrize(("rate", "ready"), [(0.2, 1), (0.6, 2), (2.0, 5)])
def test_a_flat_load_makes_no_oscillation(rate: float, ready: int) -> None:
    model = planned(ready=ready, seed=int(rate * 10))
    model.run(900, rate)
    later = model.sizes[30:]
    turns = [b - a for a, b in pairwise(later) if a != b]
    assert len(turns) <= 3
    assert sum((a > 0) != (b > 0) for a, b in pairwise(turns)) <= 1
    assert max(later) - min(later) <= max(2, ready // 3)


def test_a_looser_promise_has_a_smaller_fleet() -> None:
    sizes = []
    for promises in (FAST, LOOSE):
        model = planned(ready=8, promises=promises)
        model.run(300, 2.5)
        sizes.append(model.sizes[-1])
    assert 3 <= sizes[1] < sizes[0]


def test_a_burst_adds_several_workers_at_once() -> None:
    model = planned(ready=2)
    model.run(600, 0.5)
    before = model.sizes[-1]
    model.run(60, 5.0)
    assert max(b - a for a, b in pairwise([before, *model.sizes[-6:]])) >= 3
    model.run(120, 5.0)
    assert model.sizes[-1] >= 8


def test_the_fleet_shrinks_only_after_proof_and_a_cool_down() -> None:
    model = planned(ready=12, down_cooldown_s=120.0)
    model.run(100, 1.0)
    assert set(model.sizes) == {12}  # half the proof
    model.run(600, 1.0)
    assert model.sizes[-1] < 8
    falls = [at for (at, _), (a, b) in zip(model.plans[1:], pairwise(model.sizes), strict=True)
             if b < a]  # fmt: skip
    assert all(b - a >= 120 for a, b in pairwise(falls))


def test_a_low_load_shrinks_the_fleet_once_a_window_proves_it() -> None:
    model = planned(ready=8, window_s=600.0)
    model.run(500, 0.03)
    assert set(model.sizes) == {8}
    model.run(400, 0.03)
    assert model.sizes[-1] <= 2


def test_the_same_messages_make_the_same_decisions() -> None:
    first, second = (planned(ready=2, seed=5) for _ in range(2))
    for model in (first, second):
        model.run(300, 2.0)
    assert first.plans == second.plans


def test_one_request_ever_changes_nothing() -> None:
    model = planned(ready=3, zero_after_s=1e6)
    model.request()
    model.run(1000)
    assert set(model.sizes) == {3}


def test_least_and_most_equal_fix_the_number() -> None:
    model = planned("workers:min=3,max=3", ready=3)
    model.run(200, 8.0)
    model.run(400)
    assert set(model.sizes) == {3}


def test_the_budget_bounds_growth() -> None:
    model = planned("workers:max=32,devices=4", ready=2, max_devices=22.0)
    model.run(200, 8.0)
    assert model.sizes[-1] == 5
    assert "budget" in model.decide().reason or model.wanted == {"workers": 5}


@pytest.mark.parametrize("rate", [0.0, 8.0])
def test_bounds_set_at_run_time_hold_from_the_next_decision_on(rate: float) -> None:
    model = planned(ready=8, zero_after_s=1e6)
    model.run(100, rate)
    core = model.core
    smaller = PlannedModel("workers:min=2,max=4").pools[0]
    core.replace_options(core.options, {"workers": smaller})
    plan = model.decide()
    assert plan.wanted == {"workers": 4 if rate else 2}
    assert len(set(plan.stop) & {f"w-{n}" for n in range(40)}) == len(plan.stop)
    core.replace_options(core.options, {"workers": PlannedModel("workers:min=6").pools[0]})
    assert model.decide().wanted["workers"] >= 6


def test_the_workers_that_stop_have_the_least_valuable_cache() -> None:
    model = planned(ready=4, window_s=300.0)
    model.run(900, 0.1)
    stopped = [name for _, plan in model.plans for name in plan.stop]
    assert stopped
    assert "w-0" not in stopped  # which has served all requests


def test_a_cool_down_of_growth_is_kept() -> None:
    model = planned(ready=1, up_cooldown_s=100.0)
    for rate in (1.0, 3.0):
        model.run(120, rate)
    rises = [at for (at, _), (a, b) in zip(model.plans[1:], pairwise(model.sizes), strict=True)
             if b > a]  # fmt: skip
    assert rises
    assert all(b - a >= 100 for a, b in pairwise(rises))


def test_an_idle_model_keeps_its_least_number() -> None:
    model = planned("workers:min=2", ready=6)
    model.run(100, 0.5)
    model.run(60)
    assert model.sizes[-1] == 6
    model.run(240)
    assert model.sizes[-1] == 2


def test_a_promise_that_no_worker_keeps_is_reported_and_does_not_exhaust_the_fleet() -> None:
    model = planned(ready=3, promises=[Promise("ttft", 0.95, 0.05)])
    model.run(500, 1.0)
    assert model.core.unreachable == {"ttft p95=0.05s"}
    assert 3 <= model.sizes[-1] <= 16
    model.core.replace_options(model.core.options, {})
    assert model.core.unreachable == set()


def test_promises_for_classes_and_gaps_alone_still_bound_all_waits() -> None:
    for promises in ([Promise("itl", 0.9, 1.0)], [Promise("ttft", 0.9, 600.0, "", "batch")]):
        model = planned(ready=1, promises=promises)
        model.run(300, 2.0)
        assert model.sizes[-1] >= 3


def test_a_class_with_a_lenient_promise_needs_fewer_workers() -> None:
    sizes = []
    for request_class in (None, "batch"):
        promises = [*FAST, Promise("ttft", 0.95, 60.0, "", "batch")]
        model = planned(ready=8, promises=promises)
        model.run(300, 2.5, request_class=request_class)
        sizes.append(model.sizes[-1])
    assert sizes[1] < sizes[0]


def test_the_promises_are_those_of_the_model() -> None:
    model = planned(promises=[Promise("ttft", 0.9, 9.0, "other"), Promise("ttft", 0.9, 3.0, "m")])
    assert model.core.promises == [Promise("ttft", 0.9, 3.0, "m")]
    assert planned(promises=[Promise("ttft", 0.9, 9.0, "other")]).core.promises[0].seconds == 2.0


def test_the_first_decision_comes_long_after_the_first_worker() -> None:
    model = planned(ready=1)
    model.now = START + 86_400
    assert model.decide().wanted == {"workers": 1}
