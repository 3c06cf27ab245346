"""Blocks of expected prompts are restored to the arena ahead, while most of them are read."""

import pytest
from support.kvbm_manager import BLOCK_BYTES, ManagedNode, prompt

from kvmesh.bus.messages import Fetch
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE
from kvmesh.kvbm.core.blocks.restored import (
    MAX_TENANTS,
    RETRY_S,
    TRIAL_BLOCKS,
    RestoredBlocks,
)
from kvmesh.kvbm.core.blocks.store import MoveEnd
from kvmesh.returns.rates import BINS

OFTEN, SELDOM, NEVER = [1.0] * BINS, [0.001] * BINS, [0.0] * BINS
A, B, C = (prompt(4, seed) for seed in (1, 2, 3))


def lowered(restores: bool = True, rates: list[float] = OFTEN) -> ManagedNode:
    """A node with three prompts on disk, of which the arena has lost the first."""
    node = ManagedNode(arena=8, disk=64, restores=restores)
    for name, digests in (("a", A), ("b", B), ("c", C)):
        node.put(name, digests, session=name)
    assert (node.held(A), node.held(A, DISK)) == (0, 4)
    node.expect("a", rates)
    node.expect("b", SELDOM)
    node.expect("c", SELDOM)
    return node


def test_a_prompt_is_restored_before_it_returns_and_then_read() -> None:
    node = lowered()
    assert node.tick() == 4
    assert node.held(A) == 4
    use = node.manager.store.restored
    assert (use.bytes, use.of("").unread, use.read_bytes) == (4 * BLOCK_BYTES, 4, 0)
    node.get("again", A, session="a")
    assert (use.of("").unread, use.read_bytes, use.lost_bytes) == (0, 4 * BLOCK_BYTES, 0)
    node.get("again-2", A, session="a")
    assert use.read_bytes == 4 * BLOCK_BYTES


@pytest.mark.parametrize("rates", [SELDOM, NEVER])
def test_a_prompt_that_is_worth_no_more_than_others_stays_below(rates: list[float]) -> None:
    node = lowered(rates=rates)
    assert node.tick() == 0
    assert node.held(A) == 0


def test_nothing_is_restored_if_that_is_off_or_without_forecasts() -> None:
    node = lowered(restores=False)
    assert node.manager.restoring.mode is None
    assert node.tick() == 0
    node = ManagedNode(arena=8, disk=64, restores=True)
    for name, digests in (("a", A), ("b", B), ("c", C)):
        node.put(name, digests)
    assert node.tick() == 0


def test_a_node_without_lower_tiers_restores_nothing() -> None:
    node = ManagedNode(arena=8, restores=True)
    node.put("a", A)
    node.expect("a", OFTEN)
    assert node.manager.restoring.mode is None
    assert node.tick() == 0


def test_restored_blocks_that_are_evicted_unread_are_lost() -> None:
    node = lowered()
    node.tick()
    node.put("next", prompt(8, 9))
    use = node.manager.store.restored
    assert (use.of("").unread, use.read_bytes, use.lost_bytes) == (0, 0, 4 * BLOCK_BYTES)


def test_a_restore_that_fails_is_lost() -> None:
    node = lowered()
    node.now += 1.0
    node.manager.tick(node.now)
    moves = node.manager.store.drain_moves()
    node.manager.end_moves([(move, MoveEnd.UNREADABLE) for move in moves], node.now)
    assert node.manager.store.restored.lost_bytes == 4 * BLOCK_BYTES
    assert node.held(A) == 0


def test_loads_go_first() -> None:
    node = lowered()
    names = node.names(A)
    fetch = Fetch(1, "r", 0, A, names, names, 5, 0.0, 0.0, 0.0, session="z")
    node.manager.answer(fetch, node.now)
    running = node.manager.store.drain_moves()
    assert running
    node.expect("b", OFTEN)
    assert node.tick() == 0
    node.manager.end_moves([(move, MoveEnd.DONE) for move in running], node.now)
    assert node.manager.store.restored.bytes == 0


def test_a_fetch_waits_for_a_restore_that_runs() -> None:
    node = lowered()
    node.now += 1.0
    node.manager.tick(node.now)
    moves = node.manager.store.drain_moves()
    names = node.names(A)
    node.manager.answer(Fetch(1, "r", 0, A, names, names, 5, 0.0, 0.0, 1.0, session="a"), node.now)
    assert not node.manager.store.drain_moves()
    node.manager.end_moves([(move, MoveEnd.DONE) for move in moves], node.now)
    [fetched] = node.manager.drain_replies(node.now).values()
    assert fetched.ticket  # type: ignore[union-attr]
    assert node.manager.store.restored.read_bytes == 4 * BLOCK_BYTES


def test_blocks_come_from_the_remote_store_too() -> None:
    node = ManagedNode(arena=8, remote=64, restores=True)
    for name, digests in (("a", A), ("b", B), ("c", C)):
        node.put(name, digests, session=name)
        node.expect(name, SELDOM)
    assert (node.held(A), node.held(A, REMOTE)) == (0, 4)
    node.expect("a", OFTEN)
    assert node.tick() == 4
    assert node.held(A) == 4


def test_after_losses_one_batch_a_minute_shows_whether_it_pays_now() -> None:
    node = lowered()
    use = node.manager.store.restored
    for _ in range(TRIAL_BLOCKS):
        use.start("", 1)
        use.end("", 1, read=False)
    assert node.manager.restoring.mode == "off"
    assert node.tick() == 4
    node.put("d", prompt(8, 4))
    for name, rates in (("a", NEVER), ("b", OFTEN), ("c", NEVER), ("d", NEVER)):
        node.expect(name, rates)
    assert node.held(B) == 0
    assert node.tick(RETRY_S / 2) == 0
    assert node.tick(RETRY_S) == 4


def test_a_tenant_whose_sessions_do_not_return_stops_restores_for_itself_alone() -> None:
    node = ManagedNode(arena=8, disk=64, restores=True)
    blocks = {"evil": A, "victim": B}
    for tenant, digests in blocks.items():
        session = f"{tenant}/part\x1fs"
        node.put(tenant, digests, session=session, tenant=f"{tenant}/part")
    node.put("c", C)
    node.put("d", prompt(4, 4))
    assert (node.held(A), node.held(B)) == (0, 0)
    use = node.manager.store.restored
    for _ in range(TRIAL_BLOCKS):
        use.start("evil/other", 1)
        use.end("evil/other", 1, read=False)
    use.of("evil").wait(node.now)
    assert (use.of("evil").mode, use.of("victim").mode) == ("off", "trial")
    for tenant in blocks:
        node.expect(tenant, OFTEN)
    node.expect("c", SELDOM)
    node.expect("d", SELDOM)
    assert node.tick() == 4
    assert (node.held(A), node.held(B)) == (0, 4)
    savings = node.manager.returns.savings
    held = node.manager.store.blocks
    found = {b.tenant: savings.restored_ahead(b) for b in held.values() if b.expected}
    assert found == {"evil/part": False, "victim/part": True, "": True}


def test_the_tenants_whose_restores_are_judged_are_bounded() -> None:
    use = RestoredBlocks()
    for number in range(2 * MAX_TENANTS):
        for _ in range(TRIAL_BLOCKS):
            use.start(str(number), 1)
            use.end(str(number), 1, read=number < MAX_TENANTS)
        if number == MAX_TENANTS - 1:
            assert use.mode == "on"
    assert use.mode == "off"
    assert sum(use._modes.values()) == MAX_TENANTS


def test_a_restore_is_a_trial_until_enough_is_known() -> None:
    use = RestoredBlocks()
    seen: list[str] = []
    for number in range(6 * TRIAL_BLOCKS):
        if not seen or seen[-1] != use.mode:
            seen.append(use.mode)
        use.start("", 10)
        use.end("", 10, read=number < 2 * TRIAL_BLOCKS and number % 3 > 0)
    assert seen == ["trial", "on", "off"]
    assert use.bytes == use.read_bytes + use.lost_bytes


def test_an_expected_prompt_is_lowered_without_an_earlier_use_while_restores_pay() -> None:
    node = ManagedNode(arena=64, disk=64, restores=True, frequency=2.0)
    node.tick()
    node.put("a", A)
    node.put("b", B)
    assert node.held(A, DISK) == 0
    node.expect("a", SELDOM)
    node.expect("b", NEVER)
    node.settle()
    assert (node.held(A, DISK), node.held(B, DISK)) == (4, 0)
    assert node.held(A, ARENA) == 4
