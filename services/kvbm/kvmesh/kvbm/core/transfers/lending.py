"""What a node does for others: it lends blocks, and makes ready those that they wait for."""

from array import array
from collections.abc import Callable, Iterator, Sequence

from kvmesh.bus.messages import Fetch, Prepare, Prepared
from kvmesh.hashing import DIGEST_BYTES
from kvmesh.kvbm.core.blocks.block import ARENA, REMOTE, Block, Copy, Space
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.onboarding import Onboarding
from kvmesh.kvbm.core.transfers.prompt_blocks import Digests, PromptBlocks
from kvmesh.kvbm.core.transfers.tickets import ReadTicket

MOST_LENT = 256
MOST_ASKED = 64
MOST_WAIT_S = 1.0
PATIENCE_S = 60.0
NO_ATTACHMENT = 0


class Lending:
    """Requests of other kvbms. `shares` tells whether this one has a store that they may read.

    `consider` has blocks written to that store if they are asked for often enough; `go_on` is
    called when something may have changed for others.
    """

    def __init__(
        self,
        store: Store,
        fetches: Onboarding,
        shares: bool,
        numbers: Iterator[int],
        consider: Callable[[Sequence[Block]], None],
        go_on: Callable[[], None],
    ) -> None:
        self._store = store
        self._fetches = fetches
        self._shares = shares
        self._numbers = numbers
        self._consider = consider
        self._go_on = go_on
        self._asked: dict[int, Prepare] = {}

    def __contains__(self, reading: ReadTicket) -> bool:
        return reading.number in self._asked

    def lend(self, digests: list[bytes], block_bytes: int, now: float) -> list[Copy]:
        """Copies in the arena of the leading ones of these blocks, used until `take_back`."""
        self._store.begin(now)
        lent: list[Copy] = []
        for digest in digests[:MOST_LENT]:
            block = self._store.blocks.get(digest)
            copy = block.ready(ARENA) if block is not None else None
            if copy is None or copy.block.space.block_bytes != block_bytes:
                break
            lent.append(copy)
        self._store.hold(*lent)
        self._store.touch([copy.block for copy in lent])
        self._store.counts.lent += len(lent)
        return lent

    def take_back(self, lent: list[Copy], now: float) -> None:
        """The other node has read them, or never will."""
        self._store.begin(now)
        self._store.release(*reversed(lent))
        self._go_on()

    def prepare(self, message: Prepare, space: Space | None, now: float) -> Prepared | ReadTicket:
        """The answer, or that which `answer` is to be called with once it is due."""
        self._store.begin(now)
        if space is None or (message.stored and not self._shares):
            return Prepared(0, False)
        if len(message.digests) % DIGEST_BYTES or not message.wait_s >= 0:
            return Prepared(0, False)
        if len(self._asked) >= MOST_ASKED:
            return Prepared(0, True)
        digests = Digests(message.digests)
        prompt = PromptBlocks(space, digests, array("Q"), array("Q"), 0, "", None, [])
        number = next(self._numbers)
        found = self._store.find(digests)
        reading = self._fetches.start(number, _fetch(message), prompt, found, beyond=False)
        self._fetches.park(reading, now + min(message.wait_s, MOST_WAIT_S))
        self._asked[number] = message
        self._go_on()
        return self.answer(reading) if reading.due(now) else reading

    def answer(self, reading: ReadTicket) -> Prepared:
        """What has become ready meanwhile; nothing of it is kept for the other node."""
        message = self._asked.pop(reading.number)
        blocks, more = [copy.block for copy in reading.ready], reading.pending > 0
        self._fetches.finish(reading)
        count = self._shared(blocks) if message.stored else len(blocks)
        self._store.counts.prepared += count
        return Prepared(count, more or count < len(blocks), message.stored)

    def _shared(self, blocks: list[Block]) -> int:
        """How many leading ones the store has; those that it has not may go there now."""
        self._consider(blocks)
        self._go_on()
        missing = (n for n, block in enumerate(blocks) if block.ready(REMOTE) is None)
        return next(missing, len(blocks))


def _fetch(message: Prepare) -> Fetch:
    return Fetch(
        attachment=NO_ATTACHMENT,
        request="",
        held=0,
        digests=message.digests,
        sequence_hashes=b"",
        local=b"",
        salt=0,
        compute_tps=message.compute_tps,
        load_bps=message.load_bps,
        wait_s=PATIENCE_S,
        computes=False,
    )
