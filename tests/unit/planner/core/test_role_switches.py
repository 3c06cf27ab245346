"""Changes of role that the planner decides: before any worker starts or stops."""

import pytest
from msgspec.structs import replace
from support.planned_model import PlannedModel, worker_card

from kvmesh.planner.core.groups.role_switches import RETRY_S, exchangeable
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


def longer_prompts(made: PlannedModel) -> PlannedModel:
    """Short prompts, then long ones; workers decode in both."""
    made.run(200, 2.0, tokens=1024)
    made.run(400, 2.5, tokens=8192)
    return made


def recovery_s(made: PlannedModel, workers: int) -> int:
    """Seconds from the first long prompt until so many workers prefill."""
    made.run(200, 7.0, tokens=1024)
    seconds = 0
    while len(made.workers["pre"]) < workers:
        made.run(10, 2.5, tokens=8192)
        seconds += 10
    return seconds


@pytest.fixture(scope="module")
def able() -> PlannedModel:
    return longer_prompts(model())


@pytest.fixture(scope="module")
def frozen() -> PlannedModel:
    made = model()
    made.frozen = {f"w-{number}" for number in range(20)}
    return longer_prompts(made)


def switched(made: PlannedModel) -> list[str]:
    return [each.instance for _, plan in made.plans for each in plan.switches]


def test_workers_change_their_role_before_others_start_or_stop(able: PlannedModel) -> None:
    assert switched(able)
    assert able.wanted["pre"] >= 3
    assert max(able.sizes) <= 7
    assert len(able.workers["pre"]) >= 3, "they serve at once, without a start of 200 s"
    view = next(view for view in able.core.pools if view.pool.name == "pre")
    assert view.starts.startup_s == 200.0, "a switch teaches nothing about starts"
    assert set(switched(able)).isdisjoint(name for _, plan in able.plans for name in plan.stop)
    assert min(plan.wanted["dec"] for _, plan in able.plans) >= 1


def test_switches_serve_sooner_than_starts_for_no_more_devices() -> None:
    able, unable = model(), model(able=False)
    assert recovery_s(able, 5) + 100 <= recovery_s(unable, 5)
    assert switched(unable) == []
    until = len(able.sizes)
    assert sum(able.sizes) <= sum(unable.sizes[:until])


def test_a_worker_that_does_not_answer_counts_where_it_was_and_is_left_alone(
    frozen: PlannedModel,
) -> None:
    asked = switched(frozen)
    assert asked
    assert len(asked) == len(set(asked)), "nobody is asked twice within minutes"
    assert any("did not change its role" in plan.reason for _, plan in frozen.plans)
    core = frozen.core
    assert core.serving(asked[0]) in ("dec", None)
    assert not core.switches.may(asked[0], frozen.now)
    assert core.switches.may(asked[0], frozen.now + RETRY_S)


@pytest.fixture
def asked() -> tuple[PlannedModel, str]:
    """A model that has asked a worker just now, with its name."""
    made = model()
    made.frozen = {f"w-{number}" for number in range(20)}
    made.run(200, 2.0, tokens=1024)
    while not switched(made):
        made.run(10, 2.5, tokens=8192)
    return made, switched(made)[0]


def test_a_refusal_is_known_at_once(asked: tuple[PlannedModel, str]) -> None:
    made, instance = asked
    assert made.core.serving(instance) == "pre"
    made.core.switch_failed(instance, made.now)
    assert made.core.serving(instance) == "dec"
    made.core.switch_failed(instance, made.now)  # both the reply and the time
    assert made.core.serving(instance) == "dec"


def test_a_card_with_the_old_role_does_not_undo_a_switch(asked: tuple[PlannedModel, str]) -> None:
    made, instance = asked
    made.core.joined(worker_card(instance, "decode"), "dec", made.now)
    assert made.core.serving(instance) == "pre"
    made.core.joined(worker_card(instance, "prefill"), "pre", made.now)
    made.core.switch_failed(instance, made.now)  # a reply that came too late
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


def test_only_pools_of_one_kind_exchange_workers() -> None:
    one, other, third, fourth = parse_pools(
        ["a:serves=decode,kind=x,b:serves=prefill,kind=x,c:serves=prefill,kind=y,d"]
    )
    assert exchangeable(one, other)
    assert not any(exchangeable(one, each) for each in (one, third, fourth))
    assert not exchangeable(fourth, fourth)
