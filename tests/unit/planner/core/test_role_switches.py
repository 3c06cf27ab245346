"""Changes of role that the planner decides: before any worker starts or stops."""

from math import inf

import pytest
from msgspec.structs import replace
from support.planned_model import PlannedModel, worker_card

from kvmesh.planner.core.exchange.role_switches import RETRY_S, SWITCH_S
from kvmesh.planner.core.pools import parse_pools, pool_of
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.errors import PlannerConfigError

PROMISES = [Promise("ttft", 0.9, 5.0), Promise("itl", 0.9, 0.1)]
ONE_KIND = "dec:serves=decode,max=12,kind=gpu,pre:serves=prefill,max=12,kind=gpu"


def model(pools: str = ONE_KIND, most: float = 7.0, able: bool = True) -> PlannedModel:
    """Five workers that decode and one that prefills, with a budget of `most` devices."""
    made = PlannedModel(
        pools, promises=PROMISES, interval_s=10.0, max_devices=most, startup_s=200.0
    )
    made.core.switches.able = lambda _: able
    made.start("dec", 5)
    made.start("pre", 1)
    return made


def longer_prompts(made: PlannedModel) -> None:
    """Long answers to short prompts, then long prompts."""
    made.run(200, 2.0, tokens=1024)
    made.run(400, 2.5, tokens=8192)


def switched(made: PlannedModel) -> list[str]:
    return [each.instance for _, plan in made.plans for each in plan.switches]


def test_workers_change_their_role_before_others_start_or_stop() -> None:
    made = model()
    longer_prompts(made)
    assert switched(made)
    assert made.wanted["pre"] >= 3
    assert sum(made.wanted.values()) <= 7
    assert len(made.workers["pre"]) >= 3, "they serve at once, without a start of 200 s"
    view = next(view for view in made.core.pools if view.pool.name == "pre")
    assert view.starts.startup_s == 200.0, "a switch teaches nothing about starts"
    assert set(switched(made)).isdisjoint(name for _, plan in made.plans for name in plan.stop)


@pytest.mark.parametrize(
    ("pools", "able"),
    [(ONE_KIND, False), (ONE_KIND.replace("kind=gpu,", "kind=other,"), True)],
    ids=["not able", "another kind"],
)
def test_other_workers_are_not_asked(pools: str, able: bool) -> None:
    made = model(pools, inf, able)
    longer_prompts(made)
    assert switched(made) == []
    assert made.wanted["pre"] >= 3


def test_the_last_worker_of_a_role_keeps_it() -> None:
    made = model(most=6.0)
    longer_prompts(made)
    assert min(plan.wanted["dec"] for _, plan in made.plans) >= 1


def test_a_worker_that_does_not_answer_counts_where_it_was_and_is_left_alone() -> None:
    made = model()
    made.frozen = {f"w-{number}" for number in range(20)}
    longer_prompts(made)
    asked = switched(made)
    assert asked
    assert len(asked) == len(set(asked)), "nobody is asked twice within minutes"
    assert any("did not change its role" in plan.reason for _, plan in made.plans)
    core = made.core
    made.run(SWITCH_S + 20)
    assert all(core.serving(name) == "dec" for name in asked if name in made.workers["dec"])
    assert not core.switches.may(asked[-1], made.now)
    assert core.switches.may(asked[-1], made.now + RETRY_S)


def test_a_refusal_is_known_at_once() -> None:
    made = model()
    made.frozen = {f"w-{number}" for number in range(20)}
    made.run(200, 2.0, tokens=1024)
    while not switched(made):
        made.run(10, 2.5, tokens=8192)
    instance = switched(made)[0]
    assert made.core.serving(instance) == "pre"
    made.core.switch_failed(instance, made.now)
    assert made.core.serving(instance) == "dec"
    made.core.switch_failed(instance, made.now)  # both the reply and the time
    assert made.core.serving(instance) == "dec"


def test_a_card_with_the_old_role_does_not_undo_a_switch() -> None:
    made = model()
    made.frozen = {f"w-{number}" for number in range(20)}
    made.run(200, 2.0, tokens=1024)
    while not switched(made):
        made.run(10, 2.5, tokens=8192)
    instance = switched(made)[0]
    made.core.joined(worker_card(instance, "decode"), "dec", made.now)
    assert made.core.serving(instance) == "pre"
    made.core.joined(worker_card(instance, "prefill"), "pre", made.now)
    assert made.core.serving(instance) == "pre"
    made.core.left(instance)
    assert made.core.serving(instance) is None


def test_a_worker_of_a_labelled_pool_belongs_to_the_pool_of_its_role() -> None:
    pools = parse_pools([ONE_KIND])
    label = {"pool": "dec"}
    card = worker_card("w-0", "prefill")
    assert getattr(pool_of(replace(card, labels=label), pools), "name", "") == "pre"
    whole = worker_card("w-0", "aggregated")
    assert getattr(pool_of(replace(whole, labels=label), pools), "name", "") == "dec"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a:kind=x,b:kind=x", "serves aggregated as pool a of its kind does"),
        ("a:kind=x,b:serves=decode,kind=x,devices=2", "its devices differs from that of a"),
    ],
)
def test_pools_of_one_kind_differ_in_their_role_alone(text: str, reason: str) -> None:
    with pytest.raises(PlannerConfigError, match=reason):
        parse_pools([text])
