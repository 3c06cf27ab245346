"""A request does not wait for a load longer than computing its blocks would take."""

from array import array

from support.kvbm import SIZE, Names, layout, tokens

from kvmesh.bus.messages import Attach, Await, Commit, Fetch, Fetched, Offer, Wanted
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA, DISK
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager, ParkedFetch

BLOCKS = 20
NAMES = Names.of(bytes(32), layout(), tokens(BLOCKS))
OTHERS = Names.of(bytes(32), layout(), tokens(40, seed=1))


class DiskNode:
    """A node whose arena has been emptied to disk by other blocks."""

    def __init__(self) -> None:
        config = KvbmConfig({ARENA: 40 * 8192, DISK: 80 * 8192}, disk_frequency=1.0)
        self.manager = Manager(config)
        worker = self.manager.attach(Attach("w", "m", layout(), "lock"), 1)
        assert isinstance(worker, AttachedWorker)
        self.now = 1.0
        for names in (NAMES, OTHERS):
            self.store(names)

    def store(self, names: Names) -> None:
        """Write a prompt through and to disk, in parts that the arena takes at a time."""
        count = len(names)
        for end in range(10, count + 1, 10):
            hashes = names.sequence[: 8 * end], names.local[: 8 * end]
            offer = Offer(1, end - 10, names.digests[: 16 * end], *hashes, 0)
            wanted = self.manager.answer(offer, self.now)
            assert isinstance(wanted, Wanted)
            written = array("Q", [0] * (len(wanted.offsets) // 8)).tobytes()
            self.manager.answer(Commit(1, wanted.ticket, written), self.now)
            self.finish(self.moves())

    def moves(self) -> list[Move]:
        return self.manager.store.drain_moves()

    def finish(self, moves: list[Move]) -> None:
        self.manager.end_moves([(move, MoveEnd.DONE) for move in moves], self.now)
        if more := self.moves():
            self.finish(more)

    def fetch(self, compute_tps: float) -> int:
        """Fetch the prompt; returns the number of its ticket."""
        message = Fetch(
            1, "r", 0, NAMES.digests, NAMES.sequence, NAMES.local, 0, compute_tps, 0.0, 5.0
        )
        parked = self.manager.answer(message, self.now)
        assert isinstance(parked, ParkedFetch)
        return parked.ticket

    def tick(self, now: float) -> dict[int, Fetched]:
        self.now = now
        self.manager.tick(now)
        replies = self.manager.drain_replies(now)
        return {n: reply for n, reply in replies.items() if isinstance(reply, Fetched)}


def test_a_load_that_takes_too_long_is_given_up() -> None:
    node = DiskNode()
    seconds = 0.2
    ticket = node.fetch(BLOCKS * SIZE / seconds)
    moves = node.moves()
    assert moves
    assert node.tick(1.1) == {}
    reply = node.tick(1.21)[ticket]
    assert (reply.ticket, reply.offsets, reply.pending) == (0, b"", 0)
    assert not node.manager.onboarding.tickets
    assert node.manager.store.counts.outwaited == len(moves)
    assert len(node.manager.in_progress) == 0  # the disk has them all
    node.finish(moves)
    again = node.manager.answer(
        Fetch(1, "s", 0, NAMES.digests, NAMES.sequence, NAMES.local, 0, 0.0, 0.0, 0.0), 2.0
    )
    assert isinstance(again, Fetched)
    assert len(again.offsets) == 8 * len(moves)


def test_blocks_that_have_arrived_are_given_before() -> None:
    node = DiskNode()
    ticket = node.fetch(BLOCKS * SIZE / 0.2)
    moves = node.moves()
    node.now = 1.05
    node.manager.end_moves([(move, MoveEnd.DONE) for move in moves[:3]], node.now)
    first = node.manager.drain_replies(node.now)[ticket]
    assert isinstance(first, Fetched)
    assert len(first.offsets) == 3 * 8
    assert first.pending == BLOCKS - 3
    node.manager.answer(Await(1, ticket, 0.5), node.now)
    assert node.tick(1.15) == {}
    rest = node.tick(1.25)[ticket]
    assert (rest.ticket, rest.offsets, rest.pending) == (ticket, b"", 0)


def test_a_worker_of_unknown_speed_waits() -> None:
    node = DiskNode()
    ticket = node.fetch(0.0)
    moves = node.moves()
    assert all(reply.pending for reply in node.tick(1.45).values())
    node.finish(moves)
    assert ticket in node.manager.onboarding.tickets
