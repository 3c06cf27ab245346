"""Pools that share the requests of a model: kinds of engines with costs, prefill and decode."""

from math import inf

import pytest
from support.planned_model import TIMES, PlannedModel

from kvmesh.planner.capacity.step_times import FittedStepTimes
from kvmesh.planner.core.promises import Promise

SLOW = FittedStepTimes(TIMES.step * 2, TIMES.prefill_step * 2, TIMES.token * 2, TIMES.kv_token * 2)
PROMISES = [Promise("ttft", 0.9, 5.0)]
SPLIT = "dec:serves=decode,max=16,pre:serves=prefill,max=16"


def kinds(slow_cost: float, max_devices: float = inf) -> PlannedModel:
    model = PlannedModel(
        f"fast:max=8,min=0,cost=4,devices=2,slow:max=8,min=0,cost={slow_cost}",
        times={"slow": SLOW}, promises=PROMISES, interval_s=10.0, max_devices=max_devices,
    )  # fmt: skip
    model.start("fast", 1)
    model.start("slow", 1)
    return model


def split(pools: str = SPLIT, **options: object) -> PlannedModel:
    promises = [*PROMISES, Promise("itl", 0.9, 0.1)]
    model = PlannedModel(pools, promises=promises, interval_s=10.0, **options)  # type: ignore[arg-type]
    for pool in model.pools:
        model.start(pool.name, 1)
    return model


@pytest.mark.parametrize(("slow_cost", "cheaper"), [(0.5, "slow"), (16.0, "fast")])
def test_the_kind_with_more_capacity_per_cost_grows(slow_cost: float, cheaper: str) -> None:
    model = kinds(slow_cost)
    model.run(500, 2.0)
    dearer = {"slow": "fast", "fast": "slow"}[cheaper]
    assert model.wanted[cheaper] >= 2
    assert model.wanted[cheaper] > model.wanted[dearer]


@pytest.mark.parametrize("budget", [3.0, 6.0, inf])
def test_the_budget_counts_the_devices_of_all_pools(budget: float) -> None:
    model = kinds(0.5, max_devices=budget)
    model.run(150, 6.0)
    assert model.wanted["fast"] * 2 + model.wanted["slow"] <= budget
    assert model.sizes[-1] >= 2


def test_a_smaller_budget_cuts_the_dearest_pool_first() -> None:
    model = kinds(0.5)
    model.wanted.update(fast=3, slow=4)
    model.core.observe_wanted(model.wanted, model.now)
    options = PlannedModel(max_devices=6.0).core.options
    model.core.replace_options(options, {pool.name: pool for pool in model.pools})
    assert model.core.decide(model.now).wanted == {"fast": 1, "slow": 4}


def test_least_numbers_hold_in_every_pool() -> None:
    model = PlannedModel("a:min=1,b:min=2,c:serves=decode,min=1,p:serves=prefill,min=1")
    assert model.decide().wanted == {"a": 1, "b": 2, "c": 1, "p": 1}


def test_prefill_and_decode_workers_are_sized_apart() -> None:
    prompts, answers = split(), split()
    prompts.run(250, 2.5, tokens=8192)
    answers.run(250, 2.5, tokens=1024)  # shorter than those that prefill workers take
    assert prompts.wanted["pre"] >= 4
    assert prompts.wanted["pre"] > prompts.wanted["dec"]
    assert answers.wanted["pre"] == 1


def test_prefill_workers_without_long_prompts_go_once_a_window_proves_it() -> None:
    pools = "dec:serves=decode,max=16,pre:serves=prefill,min=0,max=16"
    model = split(pools, window_s=300.0)
    model.run(600, 0.5, tokens=1024)
    assert model.wanted == {"dec": 1, "pre": 0}


def test_promises_about_gaps_do_not_starve_the_prefill_workers() -> None:
    model = PlannedModel(SPLIT, promises=[Promise("itl", 0.9, 0.1)], interval_s=10.0)
    for pool in ("dec", "pre"):
        model.start(pool, 1)
    model.run(300, 2.5, tokens=8192)
    assert model.wanted["pre"] >= 4


def test_a_promise_that_prefill_workers_cannot_keep_stays_reported() -> None:
    model = split()
    model.core.replace_options(
        PlannedModel(promises=[Promise("ttft", 0.9, 0.2)], interval_s=10.0).core.options, {}
    )
    reported = []
    for _ in range(20):
        model.run(10, 2.0, tokens=8192)
        reported.append(frozenset(model.core.unreachable))
    assert set(reported[5:]) == {frozenset({"ttft p90=0.2s"})}


def test_a_change_by_hand_holds_its_group_only() -> None:
    model = split()
    model.run(100, 1.0, tokens=8192)
    model.wanted["dec"] = 5
    model.run(200, 3.0, tokens=8192)
    assert model.wanted["dec"] == 5
    assert model.wanted["pre"] >= 4
