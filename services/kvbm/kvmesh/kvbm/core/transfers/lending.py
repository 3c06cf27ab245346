"""Requests of other kvbms: blocks to read from this arena, and blocks to make ready for them."""

from array import array
from collections.abc import Callable, Iterator, Sequence

from kvmesh.bus.messages import Fetch, Prepare, Prepared
from kvmesh.hashing import DIGEST_BYTES
from kvmesh.kvbm.core.blocks.block import ARENA, REMOTE, Block, Copy, Space
from kvmesh.kvbm.core.blocks.load_cost import EngineSpeed
from kvmesh.kvbm.core.blocks.prompt_blocks import Digests, PromptBlocks
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.onboarding import Onboarding
from kvmesh.kvbm.core.transfers.tickets import ReadTicket

MAX_LENT = 256
MAX_PREPARING = 64
MAX_WAIT_S = 1.0
COMPUTE_WAIT_S = 60.0
NO_ATTACHMENT = 0


class Lending:
    """Lends and prepares blocks. `shares`: this node has a store that other nodes can read.

    `consider_offload` offers blocks for offload to that store; `advance` advances waiting tickets
    after changes.
    """

    def __init__(
        self,
        store: Store,
        onboarding: Onboarding,
        shares: bool,
        numbers: Iterator[int],
        consider_offload: Callable[[Sequence[Block]], None],
        advance: Callable[[], None],
    ) -> None:
        self._store = store
        self._onboarding = onboarding
        self._shares = shares
        self._numbers = numbers
        self._consider_offload = consider_offload
        self._advance = advance
        self._preparing: dict[int, Prepare] = {}

    def __contains__(self, ticket: ReadTicket) -> bool:
        return ticket.number in self._preparing

    def lend(self, digests: list[bytes], block_bytes: int, now: float) -> list[Copy]:
        """Arena copies of the leading blocks up to a missing one, held until `take_back`."""
        self._store.begin(now)
        lent: list[Copy] = []
        for digest in digests[:MAX_LENT]:
            block = self._store.blocks.get(digest)
            copy = block.registered(ARENA) if block is not None else None
            if copy is None or copy.block.space.block_bytes != block_bytes:
                break
            lent.append(copy)
        self._store.hold(*lent)
        self._store.note_read(lent)
        self._store.touch([copy.block for copy in lent])
        self._store.counts.lent += len(lent)
        return lent

    def take_back(self, lent: list[Copy], now: float) -> None:
        """Release lent copies, which the other node has read or will not read."""
        self._store.begin(now)
        self._store.release(*reversed(lent))
        self._advance()

    def prepare(self, message: Prepare, space: Space | None, now: float) -> Prepared | ReadTicket:
        """The reply, or a ticket for `answer` once its reply is due."""
        self._store.begin(now)
        if space is None or (message.stored and not self._shares):
            return Prepared(0, False)
        if len(message.digests) % DIGEST_BYTES or not message.wait_s >= 0:
            return Prepared(0, False)
        if len(self._preparing) >= MAX_PREPARING:
            return Prepared(0, True)
        digests = Digests(message.digests)
        prompt = PromptBlocks(space, digests, array("Q"), array("Q"), 0, "", None, [])
        number = next(self._numbers)
        found = self._store.find(digests)
        engine = EngineSpeed(message.compute_tps, message.load_bps)
        fetch = _fetch(message)
        ticket = self._onboarding.start(number, fetch, prompt, engine, found, beyond=False)
        self._onboarding.park(ticket, now + min(message.wait_s, MAX_WAIT_S))
        self._preparing[number] = message
        self._advance()
        return self.answer(ticket) if ticket.due(now) else ticket

    def answer(self, ticket: ReadTicket) -> Prepared:
        """End a ticket and release its blocks; the reply counts those that were ready."""
        message = self._preparing.pop(ticket.number)
        blocks, more = [copy.block for copy in ticket.ready], ticket.pending > 0
        self._onboarding.finish(ticket)
        count = self._count_shared(blocks) if message.stored else len(blocks)
        self._store.counts.prepared += count
        return Prepared(count, more or count < len(blocks), message.stored)

    def _count_shared(self, blocks: list[Block]) -> int:
        """Number of leading blocks in the shared store; the others are candidates for it."""
        self._consider_offload(blocks)
        self._advance()
        missing = (n for n, block in enumerate(blocks) if block.registered(REMOTE) is None)
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
        wait_s=COMPUTE_WAIT_S,
        computes=False,
    )
