"""A clear reaches the blocks that are on their way to another tier."""

from array import array

import pytest

from kvmesh.bus.messages import Attach, Clear, Commit, KvLayout, LayerLayout, Offer, Wanted
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE
from kvmesh.kvbm.core.blocks.store import MoveEnd, RemoteTierConfig
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager

LAYOUT = KvLayout(
    weights="w", dtype="uint8", item_bytes=1, block_size=4, layers=[LayerLayout(1, 512, 512)]
)
DIGESTS = [bytes([n]) * 16 for n in range(3)]
NAMES = array("Q", [int.from_bytes(digest[:8], "little") for digest in DIGESTS]).tobytes()


def offer(manager: Manager) -> Wanted:
    worker = manager.attach(Attach("w", "m", LAYOUT, "lock"), 1)
    assert isinstance(worker, AttachedWorker)
    message = Offer(worker.number, 0, b"".join(DIGESTS), NAMES, NAMES, 0)
    wanted = manager.answer(message, 1.0)
    assert isinstance(wanted, Wanted)
    return wanted


def managed(tier: int) -> Manager:
    """A manager that moves each new block to `tier` at once."""
    capacities = {ARENA: 4 << 20} | ({DISK: 4 << 20} if tier == DISK else {})
    remote = RemoteTierConfig(999, 50.0)
    return Manager(
        KvbmConfig(capacities, 0.5, 1.0, remote, shares=tier == REMOTE, remote_frequency=1.0)
    )


@pytest.mark.parametrize("tier", [DISK, REMOTE])
def test_a_clear_drops_blocks_that_are_moving(tier: int) -> None:
    manager = managed(tier)
    wanted = offer(manager)
    manager.answer(Commit(1, wanted.ticket, array("Q", [7] * 3).tobytes()), 1.0)
    moves = manager.store.drain_moves()
    assert {move.target.tier for move in moves} == {tier}
    assert manager.clear(Clear(), 2.0) == len(moves) == 3
    assert not manager.store.blocks
    manager.end_moves([(move, MoveEnd.DONE) for move in moves], 3.0)
    assert not manager.store.blocks
    assert all(tier.slots.used == 0 for tier in manager.store.tiers.values())
    # the shared store has received the blocks all the same
    assert manager.store.drain_remote_drops() == (DIGESTS if tier == REMOTE else [])


def test_a_clear_drops_blocks_that_the_remote_store_keeps_after_their_lease_here() -> None:
    manager = managed(REMOTE)
    wanted = offer(manager)
    manager.answer(Commit(1, wanted.ticket, array("Q", [7] * 3).tobytes()), 1.0)
    manager.end_moves([(move, MoveEnd.DONE) for move in manager.store.drain_moves()], 2.0)
    manager.clear(Clear(tiers=[ARENA]), 3.0)
    manager.tick(49.0)
    assert not manager.store.blocks, "they may have expired"
    manager.clear(Clear(salt=1), 49.0)
    assert manager.store.drain_remote_drops() == []
    manager.clear(Clear(tiers=[ARENA]), 49.0)
    assert manager.store.drain_remote_drops() == []
    manager.clear(Clear(), 49.0)
    assert manager.store.drain_remote_drops() == DIGESTS
    manager.clear(Clear(), 49.0)
    assert manager.store.drain_remote_drops() == []


def test_a_clear_drops_blocks_that_a_worker_is_writing() -> None:
    manager = managed(ARENA)
    wanted = offer(manager)
    assert manager.clear(Clear(), 2.0) == 3
    manager.answer(Commit(1, wanted.ticket, array("Q", [7] * 3).tobytes()), 3.0)
    assert not manager.store.blocks
    assert not manager.write_through.staged
    assert manager.store.tiers[ARENA].slots.used == 0
