"""Forecasts of returns order eviction in the tiers of a node, by seconds saved per second held."""

import pytest
from support.kvbm_manager import BLOCK_BYTES, ManagedNode, prompt

from kvmesh.bus.messages import ReturnForecast
from kvmesh.kvbm.core.blocks.block import ARENA, DISK
from kvmesh.kvbm.core.blocks.load_cost import FIRST_SAMPLES
from kvmesh.returns.rates import BINS, pack_rates

OFTEN, SELDOM, NEVER = [1.0] * BINS, [0.001] * BINS, [0.0] * BINS
OLD, NEW, NEXT = prompt(4, 1), prompt(4, 2), prompt(4, 3)


def two_prompts(**options: object) -> ManagedNode:
    """A node whose arena is full of two prompts, of which the older is more likely to return."""
    node = ManagedNode(arena=8, **options)  # type: ignore[arg-type]
    node.put("old", OLD, session="a")
    node.put("new", NEW, session="b")
    node.expect("old", OFTEN)
    node.expect("new", SELDOM)
    return node


def test_the_prompt_that_returns_less_often_goes_first() -> None:
    node = two_prompts()
    node.put("next", NEXT)
    assert (node.held(OLD), node.held(NEW)) == (4, 0)
    assert node.removed == {(ARENA, "unlikely", "next"): 4}
    assert node.manager.store.tiers[ARENA].unlikely == 4


def test_recency_decides_if_forecasts_are_off() -> None:
    node = two_prompts(by_forecast=False)
    node.put("next", NEXT)
    assert (node.held(OLD), node.held(NEW)) == (0, 4)
    assert node.removed == {(ARENA, "evicted", "next"): 4}


def test_recency_decides_without_forecasts() -> None:
    node = ManagedNode(arena=8)
    node.put("old", OLD)
    node.put("new", NEW)
    node.put("next", NEXT)
    assert (node.held(OLD), node.held(NEW)) == (0, 4)


def test_what_both_prompts_share_is_worth_both() -> None:
    node = ManagedNode(arena=8)
    node.put("a", prompt(5, 1, head=2), session="a")
    node.put("b", prompt(5, 2, head=2), session="b")
    node.put("c", b"".join(bytes([n, 9]) * 8 for n in range(50, 52)), session="c")
    node.expect("c", [1.5] * BINS)
    node.expect("a", OFTEN)
    node.expect("b", OFTEN)
    node.put("next", b"".join(bytes([n, 9]) * 8 for n in range(60, 66)))
    assert node.held(prompt(2, 1, head=2)) == 2


def test_a_forecast_holds_for_the_blocks_that_are_written_after_it() -> None:
    node = ManagedNode(arena=8)
    node.put("old", OLD[: 16 * 2], session="a")
    node.expect("old", OFTEN)
    node.put("old", OLD, session="a")
    node.put("new", NEW, session="b")
    node.expect("new", SELDOM)
    node.put("next", NEXT)
    assert (node.held(OLD), node.held(NEW)) == (4, 0)


def test_a_forecast_that_comes_before_the_blocks_waits_for_them() -> None:
    node = ManagedNode(arena=8)
    node.expect("old", OFTEN)
    node.put("old", OLD, session="a")
    node.put("new", NEW, session="b")
    node.expect("new", SELDOM)
    node.put("next", NEXT)
    assert node.held(OLD) == 4
    assert node.manager.returns.forecasts["unknown"] == 1


def test_a_return_ends_the_forecast() -> None:
    node = two_prompts()
    node.get("again", OLD, session="a")
    assert node.manager.returns.returns["held"] == 1
    node.expect("again", NEVER)
    node.put("next", NEXT)
    assert node.held(OLD) == 0


def test_a_return_to_evicted_blocks_is_counted() -> None:
    node = two_prompts()
    node.put("next", NEXT)
    node.get("again", NEW, session="b")
    assert node.manager.returns.returns["evicted"] == 1


def test_nothing_is_expected_of_a_released_session() -> None:
    node = two_prompts()
    node.put("both", OLD, session="c")
    node.manager.release(["a"], node.now)
    node.put("next", NEXT)
    assert node.held(OLD) == 0


def test_a_block_that_the_disk_has_too_is_worth_only_its_load() -> None:
    node = ManagedNode(arena=8, disk=8)
    node.get("speed", prompt(1, 9), compute_tps=1.0)
    node.put("old", OLD)
    node.settle()
    assert node.held(OLD, DISK) == 4
    node.manager.give_up_disk()
    node.put("new", NEW)
    node.expect("old", [0.002] * BINS)
    node.expect("new", [0.0015] * BINS)
    node.put("next", NEXT)
    assert (node.held(OLD), node.held(NEW)) == (0, 4)


def test_the_disk_evicts_what_returns_less_often() -> None:
    node = ManagedNode(arena=64, disk=8)
    node.put("old", OLD)
    node.put("new", NEW)
    node.expect("old", OFTEN)
    node.expect("new", SELDOM)
    node.put("next", NEXT)
    assert (node.held(OLD, DISK), node.held(NEW, DISK), node.held(NEXT, DISK)) == (4, 0, 4)


def test_a_prompt_that_does_not_return_is_not_written_to_disk() -> None:
    node = ManagedNode(arena=64, disk=64)
    node.expect("never", NEVER)
    node.put("never", OLD)
    assert node.held(OLD, DISK) == 0


@pytest.mark.parametrize(
    ("compute_tps", "block_s", "written"),
    [(4.0, 0.1, 4), (4.0, 10.0, 0), (0.0, 10.0, 4)],  # a block of four tokens; 0 is unknown
)
def test_blocks_go_to_disk_while_loading_them_is_faster_than_computing(
    compute_tps: float, block_s: float, written: int
) -> None:
    node = ManagedNode(arena=64, disk=64)
    node.get("speed", prompt(1, 9), compute_tps=compute_tps)
    traffic = node.manager.store.traffic[ARENA, DISK]
    for _ in range(1 + FIRST_SAMPLES):  # the first transfer over a path is not measured
        traffic.begin(node.now)
        node.now += block_s
        traffic.end(BLOCK_BYTES, node.now)
    node.put("old", OLD)
    assert node.held(OLD, DISK) == written


def test_malformed_forecasts_are_counted() -> None:
    node = two_prompts()
    node.manager.expect_returns([], node.now)
    node.manager.expect_returns([ReturnForecast("old", 0, node.now, bytes(3))], node.now)
    assert node.manager.returns.forecasts["malformed"] == 1


def test_forecasts_of_many_blocks_are_applied_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes the order of all blocks of its prompt, and fetches wait meanwhile."""
    monkeypatch.setattr("kvmesh.kvbm.core.returns.MOST_APPLIED", 3)
    node = ManagedNode(arena=8)
    node.put("a", OLD, session="a")
    node.put("b", NEW, session="b")
    returns, blocks = node.manager.returns, node.manager.store.blocks.values()
    forecasts = [ReturnForecast(name, 0, node.now, pack_rates(OFTEN)) for name in "ab"]
    for _ in range(5):
        assert len(returns.expect(forecasts)) == 3
    assert [sum(bool(block.expected) for block in blocks), len(returns.apply_due())] == [3, 3]
    node.tick()
    assert all(block.expected for block in blocks)
    assert returns.apply_due() == []
