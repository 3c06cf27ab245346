"""Workers with slow links load and write a few blocks from time to time."""

from array import array

from msgspec.structs import replace
from support.kvbm import SIZE, Names, layout, tokens

from kvmesh.bus.messages import Attach, Commit, Fetch, Fetched, Finish, Offer, Wanted
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA
from kvmesh.kvbm.core.blocks.store import RemoteTierConfig
from kvmesh.kvbm.core.blocks.write_pace import TRIAL_BLOCKS
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager

BLOCKS = 20
BLOCK_S = 0.01  # to compute a block
NAMES = Names.of(bytes(32), layout(), tokens(BLOCKS))
SLOW_S = 0.04  # to load or write one
SLOW_BPS = 8192 / SLOW_S


class MemoryNode:
    """A node with a prompt in memory, and a worker that loads it or computes it."""

    def __init__(self, remote: RemoteTierConfig | None = None) -> None:
        self.manager = Manager(KvbmConfig({ARENA: 400 * 8192}, remote=remote))
        worker = self.manager.attach(Attach("w", "m", layout(), "lock"), 1)
        assert isinstance(worker, AttachedWorker)
        assert self.write(NAMES, 0.0) == BLOCKS

    def write(self, names: Names, now: float, block_s: float = SLOW_S) -> int:
        """Write what the node wants, in so much time for a block; returns the number of blocks."""
        offer = Offer(1, 0, names.digests, names.sequence, names.local, 0)
        wanted = self.manager.answer(offer, now)
        assert isinstance(wanted, Wanted)
        count = len(array("Q", wanted.offsets))
        if wanted.ticket:
            commit = Commit(1, wanted.ticket, bytes(8 * count))
            self.manager.answer(commit, now + count * block_s)
        return count

    def load(
        self, load_bps: float, now: float, block_s: float = SLOW_S, overlaps: bool = False
    ) -> int:
        """Load what the node gives, in so much time for a block; returns the number of blocks."""
        names = NAMES.digests, NAMES.sequence, NAMES.local
        fetch = Fetch(1, "r", 0, *names, 0, SIZE / BLOCK_S, load_bps, 0.0)
        fetch = replace(fetch, overlaps=overlaps)
        fetched = self.manager.answer(fetch, now)
        assert isinstance(fetched, Fetched)
        count = len(array("Q", fetched.offsets))
        if fetched.ticket:
            self.manager.answer(Finish(1, fetched.ticket), now + count * block_s)
        return count


def test_a_slow_worker_tries_a_few_blocks_as_its_measurement_ages() -> None:
    node = MemoryNode()
    assert node.load(0.0, 1.0) == 2  # in 0.1 s, if loads are as slow as writes
    assert node.load(SLOW_BPS, 2.0) == 0
    assert node.load(SLOW_BPS, 20.0) == 0
    assert node.load(SLOW_BPS, 50.0) == 2  # in 0.1 s
    assert node.load(SLOW_BPS, 51.0) == 0
    assert node.load(SLOW_BPS, 100.0) == 2


def test_a_worker_whose_trials_are_fast_soon_loads_all() -> None:
    node = MemoryNode()
    node.load(0.0, 1.0)
    counts = [node.load(SLOW_BPS, 60.0 + number, block_s=0.001) for number in range(5)]
    assert counts == [2, 5, 10, BLOCKS, BLOCKS]
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


def prompts(count: int) -> list[Names]:
    return [Names.of(bytes(32), layout(), tokens(BLOCKS, seed=n)) for n in range(1, count + 1)]


def test_what_would_not_be_loaded_again_is_written_in_short_trials() -> None:
    node = MemoryNode()
    node.load(SLOW_BPS, 1.0)
    counts = [node.write(names, 2.0 + n) for n, names in enumerate(prompts(8))]
    # the first one rests for 20 times 0.8 s, a trial of 8 blocks for 20 times 0.32 s
    assert counts == [0, 0, 0, 0, 0, 0, 0, 0]
    counts = [node.write(names, 17.0 + n) for n, names in enumerate(prompts(8))]
    assert counts == [TRIAL_BLOCKS, 0, 0, 0, 0, 0, 0, TRIAL_BLOCKS]
    assert node.manager.store.counts.refused["slow"] == 16 * BLOCKS - 2 * TRIAL_BLOCKS


def test_a_worker_that_computes_while_it_loads_writes_over_slower_links() -> None:
    node = MemoryNode()
    assert node.load(SLOW_BPS, 1.0, overlaps=True) == BLOCKS
    first, second, third, *_ = prompts(3)
    assert node.write(first, 2.0, block_s=7.9 * BLOCK_S) == BLOCKS
    assert node.load(SLOW_BPS / 2, 4.0, overlaps=True) == BLOCKS
    assert node.write(second, 5.0, block_s=8.1 * BLOCK_S) == BLOCKS
    assert node.write(third, 7.0) == 0


def test_a_fast_trial_ends_the_limit() -> None:
    node = MemoryNode()
    node.load(SLOW_BPS, 1.0)
    first, second, third, *_ = prompts(3)
    assert node.write(first, 17.0, block_s=0.001) == TRIAL_BLOCKS
    assert node.write(second, 17.1, block_s=0.001) == BLOCKS
    assert node.write(third, 17.2) == BLOCKS


def test_blocks_are_written_slowly_for_whoever_loads_them_fast() -> None:
    names, other = prompts(2)
    node, shared = MemoryNode(), MemoryNode(RemoteTierConfig(9, 1.0))
    node.load(SLOW_BPS, 1.0)
    node.manager.attach(Attach("v", "m", layout(), "lock"), 2)
    assert node.write(names, 2.0) == 0
    key = names.digests, names.sequence, names.local
    node.manager.answer(Fetch(2, "r", 0, *key, 0, SIZE / BLOCK_S, 1e12, 0), 3.0)
    assert node.write(names, 4.0) == BLOCKS
    shared.load(SLOW_BPS, 1.0)
    assert shared.write(other, 2.0) == BLOCKS


def test_short_writes_show_only_that_a_link_is_faster() -> None:
    node = MemoryNode()
    node.load(SLOW_BPS, 1.0)
    short, other, third = prompts(3)
    part = Names(short.digests[:32], short.sequence[:16], short.local[:16])
    assert node.write(part, 20.0) == 2  # in 0.08 s
    assert node.write(short, 30.0, block_s=0.001) == TRIAL_BLOCKS
    assert node.write(other, 30.1) == BLOCKS
    assert node.write(third, 31.0) == 0


def test_an_engine_of_unknown_speed_has_no_limit() -> None:
    node = MemoryNode()
    for number, names in enumerate(prompts(3)):
        assert node.write(names, 2.0 + number) == BLOCKS
