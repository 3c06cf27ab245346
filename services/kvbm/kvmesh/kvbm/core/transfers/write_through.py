"""Write-through from engines: which offered blocks are wanted, and where they are written."""

from array import array

from kvmesh.bus.messages import Offer, Wanted
from kvmesh.kvbm.core.blocks.block import ARENA, Block, Copy, CopyState
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.retention import TierRetention
from kvmesh.kvbm.core.transfers.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.transfers.tickets import WriteTicket
from kvmesh.retention.claims import THINKING_LEVEL, RetentionWish
from kvmesh.retention.token_ranges import NO_WISH

STAGED_SHARE = 4


class OfferedBlocks:
    """All writing tickets. At most a fourth of the arena is being written at any time."""

    def __init__(self, store: Store, keeping: TierRetention) -> None:
        self._store = store
        self._keeping = keeping
        self._most = store.tiers[ARENA].slots.capacity // STAGED_SHARE
        self.writings: dict[int, WriteTicket] = {}
        self.staged = 0

    def start(
        self, number: int, message: Offer, prompt: PromptBlocks
    ) -> tuple[Wanted, list[bytes]]:
        """Stage what is wanted; also returns the digests that nobody will write now."""
        store = self._store
        first = max(0, message.first)
        # what is before the last one stays with it
        store.touch(store.find(prompt.digests[max(0, first - 1) :]))
        self._keeping.follow(prompt)
        wishes = self._keeping.wishes(prompt, first)
        ephemeral = _thinking_from(prompt, wishes)
        copies: list[Copy] = []
        unwanted: list[bytes] = []
        refused = ""
        for index in range(first, len(prompt)):
            block = store.blocks.get(prompt.digests[index])
            if block is not None and ARENA in block.copies:
                continue
            refused = refused or self._refusal(prompt, index, ephemeral)
            copy = None if refused else self._stage(block or prompt.block(index))
            if copy is not None:
                copies.append(copy)
                continue
            refused = refused or "full"
            store.counts.skip(refused)
            unwanted.append(prompt.digests[index])
        store.counts.offered += len(copies) + len(unwanted)
        self._keeping.ask(prompt, wishes, [copy.block for copy in copies])
        if not copies:
            return Wanted(0, b"", b""), unwanted
        self.writings[number] = WriteTicket(number, message.attachment, copies)
        indices = array("I", (copy.block.index for copy in copies))
        offsets = array("Q", (copy.offset for copy in copies))
        return Wanted(number, indices.tobytes(), offsets.tobytes()), unwanted

    def commit(self, writing: WriteTicket, checksums: "array[int]") -> list[Block]:
        """End a ticket: what has a checksum is registered, and returned; the rest is dropped."""
        del self.writings[writing.number]
        written: list[Block] = []
        for place, copy in enumerate(writing.copies):
            if place < len(checksums) and copy.state is CopyState.STAGED:
                self._store.register(copy, checksums[place])
                written.append(copy.block)
            else:
                self._store.drop(copy)
        self.staged -= sum(copy.block.space.slot for copy in writing.copies)
        self._store.release(*reversed(writing.copies))
        self._store.counts.written += len(written)
        return written

    def _refusal(self, prompt: PromptBlocks, index: int, ephemeral: int) -> str:
        """Why this block and all behind it are not wanted; empty if it is."""
        if self._keeping.is_closed(prompt.session):
            return "closed"
        if index >= ephemeral:
            return "thinking"
        if index and prompt.digests[index - 1] not in self._store.blocks:
            return "orphan"
        if self.staged and self.staged + prompt.space.slot > self._most:
            return "busy"
        return ""

    def _stage(self, block: Block) -> Copy | None:
        copy = self._store.reserve(block, ARENA)
        if copy is not None:
            self.staged += block.space.slot
        return copy


def _thinking_from(prompt: PromptBlocks, wishes: dict[int, RetentionWish]) -> int:
    """Where the thinking at the end begins: what follows other thinking shows that it is in use."""
    first = len(prompt)
    while first and wishes.get(first - 1, NO_WISH).level == THINKING_LEVEL:
        first -= 1
    return first
