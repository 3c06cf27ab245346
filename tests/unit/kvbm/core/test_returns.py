"""Forecasts of returns in a node: what they expect of blocks, and which go to the disk by them."""

import pytest
from support.kvbm_manager import BLOCK_BYTES, ManagedNode, prompt

from kvmesh.bus.messages import ReturnForecast
from kvmesh.kvbm.core.blocks.block import ARENA, DISK
from kvmesh.kvbm.core.blocks.load_cost import FIRST_SAMPLES
from kvmesh.returns.rates import BINS, pack_rates

OFTEN, SELDOM, NEVER = [1.0] * BINS, [0.001] * BINS, [0.0] * BINS
OLD, NEW, NEXT = prompt(4, 1), prompt(4, 2), prompt(4, 3)


def two_prompts() -> ManagedNode:
    """A node whose arena is full of two prompts, of which the older is more likely to return."""
    node = ManagedNode(arena=8, disk=64, restores=True)
    node.put("old", OLD, session="a")
    node.put("new", NEW, session="b")
    node.expect("old", OFTEN)
    node.expect("new", SELDOM)
    return node


def expected(node: ManagedNode) -> int:
    """The blocks of which something is expected."""
    return sum(bool(block.expected) for block in node.manager.store.blocks.values())


def test_recency_orders_eviction_whatever_is_forecast() -> None:
    node = two_prompts()
    node.put("next", NEXT)
    assert (node.held(OLD), node.held(NEW)) == (0, 4)
    assert node.removed[ARENA, "evicted", "next"] == 4


@pytest.mark.parametrize(("disk", "restores"), [(0, True), (64, False)])
def test_nothing_is_expected_where_nothing_is_restored(disk: int, restores: bool) -> None:
    node = ManagedNode(arena=8, disk=disk, restores=restores)
    assert not node.manager.returns.enabled
    node.put("old", OLD, session="a")
    node.expect("old", OFTEN)
    assert expected(node) == 0


def test_a_forecast_holds_for_the_blocks_that_are_written_after_it() -> None:
    node = ManagedNode(arena=8, disk=64, restores=True)
    node.put("old", OLD[: 16 * 2], session="a")
    node.expect("old", OFTEN)
    node.put("old", OLD, session="a")
    assert expected(node) == 4


def test_a_forecast_that_comes_before_the_blocks_waits_for_them() -> None:
    node = ManagedNode(arena=8, disk=64, restores=True)
    node.expect("old", OFTEN)
    node.put("old", OLD, session="a")
    assert expected(node) == 4
    assert node.manager.returns.forecasts["unknown"] == 1


def test_a_return_ends_the_forecast() -> None:
    node = two_prompts()
    node.get("again", OLD, session="a")
    assert node.manager.returns.returns["held"] == 1
    assert len(node.manager.returns.likeliest(8, lambda _: True)) == 1


def test_a_return_to_evicted_blocks_is_counted() -> None:
    node = ManagedNode(arena=8, disk=8, restores=True, frequency=9.0)
    node.put("old", OLD, session="a")
    node.manager.give_up_disk()
    node.expect("old", OFTEN)
    node.put("new", NEW)
    node.put("next", NEXT)
    node.get("again", OLD, session="a")
    assert sum(node.manager.returns.returns.values()) == 1


def test_nothing_is_expected_of_a_released_session() -> None:
    node = two_prompts()
    node.manager.release(["a", "b"], node.now)
    assert node.manager.returns.likeliest(8, lambda _: True) == []


def test_a_prompt_that_does_not_return_is_not_written_to_disk() -> None:
    node = ManagedNode(arena=64, disk=64, restores=True)
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
    """Each concerns all blocks of its prompt, and fetches wait meanwhile."""
    monkeypatch.setattr("kvmesh.kvbm.core.returns.MOST_APPLIED", 3)
    node = ManagedNode(arena=8, disk=8, restores=True)
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
