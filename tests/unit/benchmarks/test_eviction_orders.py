"""The orders of eviction that benchmarks/agentic.py compares, on cases with a known answer."""

from array import array
from math import inf

import pytest
from agentic_orders import (
    Belady,
    CostRule,
    Idleness,
    Order,
    Recency,
    ToolTimes,
    order_blocks,
)
from agentic_runs import FILTERED, LRU, OURS, Policy, Scene, paced_agents, play
from agentic_storage import IdleShare, idle_shares
from retention import Managed, schedule

from kvmesh.worker.enginecore.block_manager import BlockManager

TOOL, SLOW = ("tool", "ls"), ("tool", "test")


def prefill_s(tokens: int) -> float:
    return tokens / 1000


class Cache:
    """A block manager under an order; session n has the blocks 100n, 100n + 1, …"""

    def __init__(self, capacity: int, order: Order) -> None:
        self.blocks = BlockManager(capacity)
        self.order = order
        order_blocks(self.blocks, order)

    def use(
        self,
        session: int,
        at: float,
        until: float,
        waits_for: tuple[str, ...] = TOOL,
        returns_at: float = inf,
        prompt: "array[int] | None" = None,
    ) -> int:
        """A session uses its prompt from `at` to `until`; returns the blocks found."""
        hashes = prompt or array("Q", range(100 * session, 100 * session + 4))
        blocks, order = self.blocks, self.order
        blocks.now = at
        order.begin(session, at)
        found = blocks.lock_prefix(hashes)
        new = hashes[found:]
        assert blocks.allocate(len(new))
        blocks.promote(hashes[found - 1] if found else None, 0, new, new)
        blocks.now = until
        order.use(session, blocks.match_prefix(hashes).runs)
        blocks.unlock(hashes)
        order.end(session, until, waits_for, 4000, returns_at)
        return found

    def held(self) -> set[int]:
        """Sessions whose whole prompt is held."""
        return {block // 100 for block in self.blocks.contents if block % 100 == 3}


def test_belady_keeps_the_prompt_that_returns_first() -> None:
    known, recent = Cache(8, Belady()), Cache(8, Recency())
    for cache in (known, recent):
        cache.use(1, 0.0, 1.0, returns_at=10.0)
        cache.use(2, 1.0, 2.0, returns_at=100.0)
        cache.use(3, 2.0, 3.0, returns_at=50.0)
    assert known.held() == {1, 3}
    assert recent.held() == {2, 3}
    assert known.use(1, 10.0, 11.0) == 4


def test_a_session_that_never_returns_goes_first() -> None:
    cache = Cache(8, Belady())
    cache.use(1, 0.0, 1.0, returns_at=1e6)
    cache.use(2, 1.0, 2.0)
    cache.use(3, 2.0, 3.0, returns_at=50.0)
    assert cache.held() == {1, 3}


def test_a_finished_session_goes_first() -> None:
    cache = Cache(8, Idleness())
    cache.use(1, 0.0, 1.0)
    cache.use(2, 1.0, 2.0)
    cache.order.finish(2)
    cache.use(3, 2.0, 3.0)
    assert cache.held() == {1, 3}


def test_a_shared_prefix_has_the_value_of_its_best_user() -> None:
    order = Belady()
    cache = Cache(6, order)
    shared = [900, 901]
    cache.use(1, 0.0, 1.0, returns_at=100.0, prompt=array("Q", [*shared, 100, 101]))
    cache.use(2, 1.0, 2.0, returns_at=5.0, prompt=array("Q", [*shared, 200, 201]))
    cache.use(3, 2.0, 3.0, returns_at=50.0, prompt=array("Q", [300, 301]))
    assert cache.blocks.contents == {*shared, 200, 201, 300, 301}


def test_idlest_sessions_go_first() -> None:
    cache = Cache(8, Idleness())
    for start in (0.0, 20.0):
        cache.use(1, start, start + 18.0)  # idle for a tenth of its time
        cache.use(2, start + 18.0, start + 20.0)
    cache.use(3, 41.0, 42.0)
    assert cache.held() == {1, 3}


def test_times_to_live_follow_the_gaps_of_each_tool() -> None:
    order = ToolTimes(prefill_s, memory=16_000)
    cache = Cache(16, order)
    for round_ in range(12):
        start = 1000.0 * round_
        cache.use(1, start, start + 1.0, TOOL)
        cache.use(1, start + 2.0, start + 3.0, SLOW)
        cache.use(1, start + 903.0, start + 904.0, ("human",))
    cache.use(2, 20_000.0, 20_001.0, TOOL)
    cache.use(3, 20_001.0, 20_002.0, SLOW)
    assert order.sessions[2].pinned_until == pytest.approx(20_002.0)
    assert order.sessions[3].pinned_until == 20_002.0  # 900 s cost more than computing it again


def test_the_cost_rule_learns_which_waits_end_soon() -> None:
    cache = Cache(8, CostRule(prefill_s))
    for round_ in range(20):
        start = 1000.0 * round_
        cache.use(1, start, start + 1.0, TOOL)
        cache.use(1, start + 3.0, start + 4.0, SLOW)
    cache.use(2, 30_000.0, 30_001.0, TOOL)
    cache.use(1, 30_001.0, 30_002.0, SLOW)
    cache.use(3, 30_002.0, 30_003.0, TOOL)
    assert cache.held() == {2, 3}


def test_recency_is_the_engines_own_order_without_hints() -> None:
    uses = schedule(paced_agents(sessions=6, steps=8, seed=0))
    own = Managed(120, told=False)
    ordered = Managed(120, told=False)
    order_blocks(ordered.blocks, Recency())
    assert own.run(uses) == ordered.run(uses)


def small(policy: Policy, host: int = 0) -> tuple[float, float]:
    """Share of the ideal hits and GiB written to the host by paced sessions."""
    workload = paced_agents(sessions=8, steps=6, seed=0)
    result = play(workload, Scene(40_960, (1.0,), host=host), policy, 0)
    return result.of_ideal, result.gib_down


def test_a_simulation_runs_under_an_order() -> None:
    assert 0 < small(LRU)[0] < 1
    assert small(OURS)[0] > 0


def test_a_filter_writes_less() -> None:
    assert 0 < small(FILTERED, 4)[1] < small(LRU, 4)[1]


def test_with_all_waits_known_the_fewest_blocks_are_idle() -> None:
    rows = {row.policy: row for row in idle_shares(paced_agents(sessions=8, steps=6, seed=0))}
    assert all(isinstance(row, IdleShare) for row in rows.values())
    known = rows["all waits known"].percent
    assert known <= 100.5
    assert known <= min(row.percent for row in rows.values()) + 0.5
