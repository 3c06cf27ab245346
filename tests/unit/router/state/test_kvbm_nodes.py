"""Overlaps of workers on a node with a kvbm, computed by hand."""

from random import Random

import pytest
from support.routing import overlaps, request, sequence, worker

from kvmesh.bus.messages import Decision, Instance, NodeStore, Placement, Role
from kvmesh.router.placement.router import RouterCore
from kvmesh.settings.schema import RouterSettings

TEN = sequence(*range(10))
Held = dict[str, tuple[int, ...]]


def kvbm(name: str, node: str, key: str = "key", layout: str = "16 heads") -> Instance:
    """A kvbm's card; `layout` is that of its workers, if it has any."""
    layouts = {"m": [layout]} if layout else {}
    store = NodeStore(directory="", tier_bytes=[1, 1, 1], models=["m"], layouts=layouts, key=key)
    return Instance(
        instance=name, role=Role.KVBM, name=name, version="0", started=0.0, node=node, store=store
    )


def core(predicted_ttl_s: float = 0.0) -> RouterCore:
    """Workers a1 and a2 on node a, b1 on node b, c1 on node c; only a and b have a kvbm."""
    router = RouterCore(
        "m", "r", RouterSettings(predicted_ttl_s=predicted_ttl_s, prefill_weight=1.0), Random(7)
    )
    for card in (kvbm("ka", "a"), kvbm("kb", "b"), kvbm("nowhere", "")):
        router.join(card)
    for name in ("a1", "a2", "b1", "c1"):
        router.join(worker(name, node=name[0]))
    return router


def rows(decision: Decision) -> Held:
    return {c.instance: tuple(c.overlap) for c in decision.candidates}


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param(
            {"a1": (4,), "ka": (0, 6, 1, 2)},
            {"a1": (4, 2, 1, 2), "a2": (0, 6, 1, 2), "b1": (0, 0, 0, 9), "c1": (0, 0, 0, 0)},
            id="each tier adds what lies beyond those above it",
        ),
        pytest.param(
            {"a1": (8,), "ka": (0, 6, 1, 2)},
            {"a1": (8, 0, 0, 1), "a2": (0, 6, 1, 2), "b1": (0, 0, 0, 9), "c1": (0, 0, 0, 0)},
            id="what the engine holds anyway adds nothing",
        ),
        pytest.param(
            {"ka": (0, 3), "kb": (0, 0, 5)},
            {"a1": (0, 3, 0, 2), "a2": (0, 3, 0, 2), "b1": (0, 0, 5, 0), "c1": (0, 0, 0, 0)},
            id="what only another node has counts as remote",
        ),
        pytest.param(
            {"c1": (2, 3), "nowhere": (0, 9), "stranger": (9,)},
            {"a1": (0, 0, 0, 0), "a2": (0, 0, 0, 0), "b1": (0, 0, 0, 0), "c1": (2, 3, 0, 0)},
            id="a worker's own tiers are its own, and who is on no known node serves nobody",
        ),
        pytest.param(
            {"a2": (1, 1, 5), "ka": (0, 4)},
            {"a1": (0, 4, 0, 0), "a2": (1, 3, 3, 0), "b1": (0, 0, 0, 4), "c1": (0, 0, 0, 0)},
            id="of a worker's own tier and its node's, the longer counts",
        ),
    ],
)
def test_overlaps_by_tier(held: Held, expected: Held) -> None:
    decision = core().decide(request("1", TEN), overlaps(held), 0.0)
    assert rows(decision) == expected


def test_each_tier_lowers_the_cost_by_its_credit_as_documented() -> None:
    held = overlaps({"a1": (4,), "ka": (0, 6, 2)})
    decision = core().decide(request("1", TEN), held, 0.0)
    prefill = {c.instance: c.cost - 10 for c in decision.candidates}  # 10 blocks to decode
    assert prefill == {"a1": 4.0, "a2": 5.0, "b1": 8.0, "c1": 10.0}
    assert decision.chosen.instance == "a1"


def test_the_rank_of_a_kvbm_does_not_matter() -> None:
    decision = core().decide(request("1", TEN), overlaps({"ka": (0, 6)}, rank=3), 0.0)
    assert rows(decision)["a1"] == (0, 6, 0, 0)


def test_predicted_blocks_precede_those_of_the_node() -> None:
    router = core(predicted_ttl_s=5.0)
    router.commit(
        router.decide(request("0", TEN[:40], placement=Placement(instance="a1")), None, 0.0), 0.0
    )
    decision = router.decide(request("1", TEN), overlaps({"ka": (0, 7)}), 0.0)
    assert rows(decision)["a1"] == (5, 2, 0, 0)
    assert rows(decision)["a2"] == (0, 7, 0, 0)


def test_the_credit_follows_a_kvbm_that_leaves_or_moves() -> None:
    router = core()
    answer = overlaps({"ka": (0, 6), "kb": (0, 2)})
    router.leave("ka")
    decision = router.decide(request("1", TEN), answer, 0.0)
    assert rows(decision)["a1"] == (0, 0, 0, 0)
    assert rows(decision)["b1"] == (0, 2, 0, 0)
    router.join(kvbm("ka", "c"))
    decision = router.decide(request("1", TEN), answer, 0.0)
    assert rows(decision)["c1"] == (0, 6, 0, 0)
    assert rows(decision)["b1"] == (0, 2, 0, 4)
    router.join(worker("d1", node="c"))
    assert rows(router.decide(request("1", TEN), answer, 0.0))["d1"] == (0, 6, 0, 0)


@pytest.mark.parametrize(
    ("others", "remote"),
    [
        pytest.param({"key": ""}, 0, id="a node that shares nothing"),
        pytest.param({"key": "another"}, 0, id="a node with another key"),
        pytest.param({"layout": "8 heads"}, 0, id="a node whose workers have another layout"),
        pytest.param({"layout": ""}, 6, id="a node without workers of the model"),
        pytest.param({}, 6, id="a node like this one"),
    ],
)
def test_a_node_is_credited_only_with_blocks_that_it_can_load(
    others: dict[str, str], remote: int
) -> None:
    router = core()
    router.join(kvbm("kb", "b", **others))
    decision = router.decide(request("1", TEN), overlaps({"kb": (0, 6)}), 0.0)
    assert rows(decision)["a1"] == (0, 0, 0, remote)
    assert rows(decision)["b1"] == (0, 6, 0, 0)
