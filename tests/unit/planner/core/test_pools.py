"""Pools of the settings, and the pool of a worker's card."""

import pytest

from kvmesh.bus.messages import Instance, ModelCard, Role
from kvmesh.planner.core.pools import Pool, parse_pools, pool_of
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.settings import Settings, load, to_env


def card(serves: str = "aggregated", model: str = "m", **labels: str) -> Instance:
    model_card = ModelCard(name=model, context=4096, block_size=16, files="")
    return Instance(
        instance="w-1",
        role=Role.WORKER,
        name="w",
        version="",
        started=0.0,
        model=model_card,
        serves=serves,
        labels=labels,
    )


def test_a_name_alone_has_the_defaults() -> None:
    assert parse_pools(["workers"]) == [Pool("workers")]
    assert parse_pools(Settings().planner.pools) == [Pool("workers", min=1, max=8)]


def test_every_key_is_read() -> None:
    text = "h100:serves=decode,min=0,max=4,cost=2.5,devices=8,model=a:b/c,target=deployment/x"
    assert parse_pools([text]) == [
        Pool("h100", "decode", 0, 4, 2.5, 8, "a:b/c", "deployment/x"),
    ]


def test_pools_survive_the_environment_which_splits_at_commas() -> None:
    texts = ["decode:serves=decode,max=4", "prefill", "spot:cost=0.5"]
    settings = load(None, {"KVMESH_PLANNER_POOLS": ",".join(texts)}, {})
    assert parse_pools(settings.planner.pools) == parse_pools(texts)
    again = load(None, to_env(settings), {})
    assert parse_pools(again.planner.pools) == parse_pools(texts)
    assert [pool.name for pool in parse_pools(texts)] == ["decode", "prefill", "spot"]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([], "no pool is given"),
        ([" , "], "no pool is given"),
        (["max=4"], "'max=4' belongs to no pool"),
        (["a", "b", "a"], "pool a: is given twice"),
        (["a:min=1,min=2"], "pool a: min is given twice"),
        (["a b"], "pool a b: a name consists of"),
        ([":min=1"], "pool : a name consists of"),
        (["a:"], "pool a: '' is not of the form KEY=VALUE"),
        (["a:min"], "pool a: 'min' is not of the form KEY=VALUE"),
        (["a:min="], "pool a: 'min=' is not of the form KEY=VALUE"),
        (["a:size=3"], "unknown key size; the keys are serves, min, max, cost"),
        (["a:serves=all"], "serves=all: must be one of aggregated, prefill, decode"),
        (["a:min=-1"], "min=-1: must be a whole number of at least 0"),
        (["a:max=0"], "max=0: must be a whole number of at least 1"),
        (["a:max=2.5"], "max=2.5: must be a whole number"),
        (["a:max=٣"], "max=٣: must be a whole number"),
        (["a:max=99999999999"], "must be a whole number"),
        (["a:min=3,max=2"], "min 3 exceeds max 2"),
        (["a:devices=0"], "devices=0: must be a whole number of at least 1"),
        (["a:cost=nan"], "cost=nan: must be a finite number of at least 0"),
        (["a:cost=inf"], "cost=inf: must be a finite number"),
        (["a:cost=-0.1"], "cost=-0.1: must be a finite number"),
        (["a:cost=cheap"], "cost=cheap: must be a finite number"),
        (["a:target=t", "b:target=t"], "pool b: has the same target as pool a"),
    ],
)
def test_a_mistake_is_named(texts: list[str], reason: str) -> None:
    with pytest.raises(PlannerConfigError, match=r"^planner\.pools: ") as caught:
        parse_pools(texts)
    assert reason in str(caught.value)


def test_a_label_decides_before_all_else() -> None:
    pools = parse_pools(["a", "b:serves=decode"])
    assert pool_of(card(pool="b"), pools) == pools[1]
    assert pool_of(card(pool="elsewhere"), pools) is None


def test_without_a_label_the_first_pool_that_fits_counts() -> None:
    pools = parse_pools(["d:serves=decode", "x:model=x", "any", "later"])
    names = {
        ("decode", "m"): "d",
        ("aggregated", "x"): "x",
        ("aggregated", "m"): "any",
    }
    for (serves, model), name in names.items():
        found = pool_of(card(serves, model), pools)
        assert found is not None
        assert found.name == name
    assert pool_of(card("prefill"), pools) is None
