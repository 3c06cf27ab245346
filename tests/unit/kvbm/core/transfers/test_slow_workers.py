"""A worker that was measured to load slowly is given a few blocks from time to time."""

from array import array

from support.kvbm import SIZE, Names, layout, tokens

from kvmesh.bus.messages import Attach, Commit, Fetch, Fetched, Finish, Offer, Wanted
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager

BLOCKS = 20
BLOCK_S = 0.01  # to compute a block
NAMES = Names.of(bytes(32), layout(), tokens(BLOCKS))
SLOW_BPS = 8192 / 0.025


class MemoryNode:
    """A node with a prompt in memory, and a worker that loads it or computes it."""

    def __init__(self) -> None:
        self.manager = Manager(KvbmConfig({ARENA: 100 * 8192}))
        worker = self.manager.attach(Attach("w", "m", layout(), "lock"), 1)
        assert isinstance(worker, AttachedWorker)
        offer = Offer(1, 0, NAMES.digests, NAMES.sequence, NAMES.local, 0)
        wanted = self.manager.answer(offer, 0.0)
        assert isinstance(wanted, Wanted)
        self.manager.answer(Commit(1, wanted.ticket, bytes(len(wanted.offsets))), 0.0)

    def load(self, load_bps: float, now: float, block_s: float = 0.025) -> int:
        """Load what the node gives, in so much time for a block; returns the number of blocks."""
        names = NAMES.digests, NAMES.sequence, NAMES.local
        fetch = Fetch(1, "r", 0, *names, 0, SIZE / BLOCK_S, load_bps, 0.0)
        fetched = self.manager.answer(fetch, now)
        assert isinstance(fetched, Fetched)
        count = len(array("Q", fetched.offsets))
        if fetched.ticket:
            self.manager.answer(Finish(1, fetched.ticket), now + count * block_s)
        return count


def test_a_slow_worker_tries_a_few_blocks_as_its_measurement_ages() -> None:
    node = MemoryNode()
    assert node.load(0.0, 1.0) == BLOCKS
    assert node.load(SLOW_BPS, 2.0) == 0
    assert node.load(SLOW_BPS, 20.0) == 0
    assert node.load(SLOW_BPS, 41.0) == 4
    assert node.load(SLOW_BPS, 42.0) == 0
    assert node.load(SLOW_BPS, 82.0) == 4


def test_a_worker_whose_trials_are_fast_soon_loads_all() -> None:
    node = MemoryNode()
    node.load(0.0, 1.0)
    counts = [node.load(SLOW_BPS, 60.0 + number, block_s=0.001) for number in range(4)]
    assert counts == [4, 8, 16, BLOCKS]
    assert node.load(SLOW_BPS, 70.0) == BLOCKS  # this one was slow again
    assert node.load(SLOW_BPS, 71.0) == 0


def test_workers_are_doubted_each_for_itself() -> None:
    node = MemoryNode()
    node.load(0.0, 1.0)
    node.manager.attach(Attach("v", "m", layout(), "lock"), 2)
    fetch = Fetch(2, "r", 0, NAMES.digests, NAMES.sequence, NAMES.local, 0, SIZE / BLOCK_S, 1e12, 0)
    fetched = node.manager.answer(fetch, 2.0)
    assert isinstance(fetched, Fetched)
    assert len(fetched.offsets) == 8 * BLOCKS
    assert node.load(SLOW_BPS, 2.0) == 0
