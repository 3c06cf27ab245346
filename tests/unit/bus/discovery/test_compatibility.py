"""Workers that differ from the oldest one are left out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.routing import worker

from kvmesh.bus.discovery.compatibility import (
    MAX_KINDS,
    Compatibility,
    Statements,
    misfits,
    namesakes,
)
from kvmesh.bus.discovery.settled import LONGEST_NAME, MAX_MODELS, shown
from kvmesh.bus.messages import Instance, Role, Settled


def card(worker_name: str, started: float = 0.0, engine: str = "mock", **facts: Any) -> Instance:
    instance = worker(worker_name, started=started, engine=engine)
    assert instance.model is not None
    return replace(instance, model=replace(instance.model, **facts))


@pytest.mark.parametrize(
    ("fact", "ours", "theirs", "words"),
    [
        ("block_size", 16, 32, "block size 32 differs from 16"),
        ("hash_version", 1, 2, "hash version 2 differs from 1"),
        ("tokenizer", "9f3a", "77b1", "tokenizer 77b1 differs from 9f3a"),
        ("template", "9f3a", "77b1", "chat template 77b1 differs from 9f3a"),
        ("config", "9f3a", "77b1", "config.json 77b1 differs from 9f3a"),
        ("revision", "v1", "v2", "model revision v2 differs from v1"),
        ("weights", "9f3a", "77b1", "digest of the weights 77b1 differs from 9f3a"),
        ("kv_layout", "bf16", "fp8", "KV layout fp8 differs from bf16"),
        ("context", 8192, 4096, "context 4096 differs from 8192"),
    ],
)
def test_a_worker_that_differs_is_left_out_and_both_values_are_named(
    fact: str, ours: object, theirs: object, words: str
) -> None:
    facts: list[dict[str, Any]] = [{fact: ours}, {fact: theirs}]
    old = [card(name, **facts[0]) for name in ("worker-0", "worker-1")]
    found = misfits([card("worker-2", 1.0, **facts[1]), *old])
    assert found == {"worker-2": f"worker-2: {words} of worker-0, worker-1 (m)"}


def test_an_unstated_fact_matches_and_the_next_card_states_it() -> None:
    cards = [card("old"), card("new", 1.0, tokenizer="a"), card("other", 2.0, tokenizer="b")]
    assert list(misfits(cards)) == ["other"]


def test_layouts_are_compared_among_engines_of_one_kind() -> None:
    cards = [card("a", kv_layout="x"), card("b", 1.0, "torch", kv_layout="y")]
    assert misfits(cards) == {}


def test_models_are_compared_separately() -> None:
    assert misfits([card("a", tokenizer="x"), card("b", 1.0, tokenizer="y", name="n")]) == {}


def test_a_misfit_is_admitted_once_the_others_left() -> None:
    found = Compatibility()
    first, second = card("a", tokenizer="x"), card("b", 1.0, tokenizer="y")
    found.join(second)
    found.join(first)
    assert list(found.misfits) == ["b"]
    assert [c.name for c in found.fitting] == ["a"]
    found.join(replace(first, draining=True))
    assert found.misfits == {}
    found.join(first)
    found.leave("a")
    assert found.misfits == {}


def test_a_namesake_is_another_live_instance() -> None:
    one, two = card("w"), replace(card("w"), instance="w-2")
    assert namesakes(one, [one, two, card("v")]) == ["w-2"]
    assert namesakes(one, [one, replace(two, draining=True)]) == []


def settled(*cards: Instance) -> Settled:
    group = Compatibility()
    for each in cards:
        group.join(each)
    group.settle()
    assert group.settled is not None
    return group.settled


def witness(name: str, started: float, *statements: Settled, role: Role = Role.ROUTER) -> Instance:
    return replace(worker(name, started=started), role=role, model=None, settled=list(statements))


@pytest.mark.parametrize("first", [0, 1])
def test_those_that_serve_keep_serving_whatever_the_age_of_one_that_differs(first: int) -> None:
    serving, older = card("a", 1.0, tokenizer="x"), card("b", 0.0, tokenizer="y")
    found = Compatibility(settled(serving))
    for each in (serving, older) if first == 0 else (older, serving):
        found.join(each)
    assert list(found.misfits) == ["b"]
    found.settle()
    found.join(replace(serving, draining=True))  # nobody of the settled kind is left
    assert found.misfits == {}
    found.settle()
    found.join(card("c", 2.0, tokenizer="x"))
    assert list(found.misfits) == ["c"]


def test_a_serving_worker_that_changes_its_facts_leaves_the_others() -> None:
    found = Compatibility()
    turncoat = card("a", 0.0, tokenizer="x")
    for each in (turncoat, card("b", 1.0, tokenizer="x"), card("c", 2.0)):
        found.join(each)
    found.settle()
    found.join(card("a", 0.0, tokenizer="y"))
    assert list(found.misfits) == ["a"]
    found.join(turncoat)
    assert found.misfits == {}


def test_the_card_that_is_served_stays_while_a_worker_has_it() -> None:
    found = Compatibility()
    found.join(card("b", 1.0, files="good"))
    found.settle()
    found.join(card("a", 0.0, files="other"))
    found.join(card("c", 2.0, files="good", adapters=["x@1"]))
    assert [each.name for each in found.fitting] == ["b", "c", "a"]
    found.leave("b")
    found.settle()
    assert [each.name for each in found.fitting] == ["c", "a"]
    found.leave("c")
    found.settle()
    found.join(card("d", 3.0, files="good"))
    assert [each.name for each in found.fitting] == ["a", "d"]


def test_the_oldest_router_or_frontend_that_serves_a_model_says_what_is_settled() -> None:
    x, y = card("a", tokenizer="x"), card("b", 1.0, tokenizer="y")
    older, newer = witness("r-1", 1.0, settled(y)), witness("r-2", 2.0, settled(x))
    empty = witness("r-0", 0.0)
    assert misfits([x, y, newer, older, empty]).keys() == {"a"}
    assert misfits([x, y, newer, empty]).keys() == {"b"}
    liar = witness("w-9", 0.5, settled(x), role=Role.WORKER)
    assert misfits([x, y, older, liar]).keys() == {"a"}
    assert Statements([older], own="r-1").of("m") is None


def test_statements_have_a_bounded_size() -> None:
    groups = []
    for number in range(MAX_MODELS + 10):
        group = Compatibility()
        group.join(card("w", name=f"m{number:04}"))
        group.settle()
        groups.append(group)
    large = Compatibility()
    for number in range(2 * MAX_KINDS):
        large.join(card(f"w{number}", float(number), f"engine{number}", name="z"))
    large.settle()
    endless = Compatibility()
    endless.join(card("w", name="n" * (LONGEST_NAME + 1)))
    endless.settle()
    found = shown([*groups, large, endless])
    assert len(found) == MAX_MODELS
    assert (found[0].model, len(found[0].kinds)) == ("z", MAX_KINDS)


changes = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.sampled_from(["join", "drain", "leave"]),
        st.integers(0, 3),
        st.sampled_from(["mock", "torch"]),
        st.fixed_dictionaries(
            {"tokenizer": st.sampled_from(["", "x", "y"]), "kv_layout": st.sampled_from(["", "k"])}
        ),
    ),
    max_size=30,
)


@given(changes, st.sampled_from(["", "x", "y"]))
def test_the_order_of_changes_makes_no_difference(
    steps: list[tuple[str, str, int, str, dict[str, str]]], serving: str
) -> None:
    statement = settled(card("s", tokenizer=serving)) if serving else None
    found, live = Compatibility(statement), dict[str, Instance]()
    for name, change, started, engine, facts in steps:
        if change == "leave":
            found.leave(name)
            live.pop(name, None)
        else:
            made = replace(card(name, float(started), engine, **facts), draining=change == "drain")
            found.join(made)
            live[name] = made
        anew = Compatibility(statement)
        for each in sorted(live.values(), key=lambda each: (each.started, each.instance)):
            anew.join(each)
        anew._compare()
        assert found.misfits.keys() == anew.misfits.keys()
        assert found.fitting == anew.fitting
