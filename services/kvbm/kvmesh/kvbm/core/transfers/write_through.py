"""Write-through from engines: write tickets for the offered blocks that the node wants."""

from array import array

from kvmesh.bus.messages import Offer, Wanted
from kvmesh.kvbm.core.blocks.block import ARENA, Block, Copy, CopyState
from kvmesh.kvbm.core.blocks.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.retention import TierRetention
from kvmesh.kvbm.core.returns import NodeReturns
from kvmesh.kvbm.core.transfers.tickets import WriteTicket
from kvmesh.retention.claims import THINKING_LEVEL, RetentionWish
from kvmesh.retention.token_ranges import NO_WISH

STAGED_SHARE = 4


class OfferedBlocks:
    """All write tickets. At most a quarter of the arena is staged at any time."""

    def __init__(self, store: Store, retention: TierRetention, returns: NodeReturns) -> None:
        self._store = store
        self._retention = retention
        self._returns = returns
        self._max_staged = store.tiers[ARENA].slots.capacity // STAGED_SHARE
        self.tickets: dict[int, WriteTicket] = {}
        self.staged = 0

    def start(
        self, number: int, message: Offer, prompt: PromptBlocks, most: int | None = None
    ) -> tuple[Wanted, list[bytes]]:
        """Stage the wanted blocks, at most so many; also return the digests of the refused ones."""
        store = self._store
        first = max(0, message.first)
        # includes the parent of the first offered block, which must not be evicted before it
        store.touch(store.find(prompt.digests[max(0, first - 1) :]))
        self._retention.follow(prompt)
        wishes = self._retention.wishes(prompt, first)
        thinking = _trailing_thinking(prompt, wishes)
        copies: list[Copy] = []
        refused: list[bytes] = []
        reason = ""
        for index in range(first, len(prompt)):
            block = store.blocks.get(prompt.digests[index])
            if block is not None and ARENA in block.copies:
                continue
            reason = reason or self._refusal(prompt, index, thinking)
            if most is not None and len(copies) >= most:
                reason = reason or "slow"
            copy = None if reason else self._stage(block or prompt.block(index), prompt.request)
            if copy is not None:
                copies.append(copy)
                continue
            reason = reason or "full"
            store.counts.refuse(reason)
            refused.append(prompt.digests[index])
        store.counts.offered += len(copies) + len(refused)
        self._retention.apply(prompt, wishes, [copy.block for copy in copies])
        self._returns.on_staged(prompt, [copy.block for copy in copies])
        if not copies:
            return Wanted(0, b"", b""), refused
        self.tickets[number] = WriteTicket(
            number, message.attachment, copies, store.now, prompt.request
        )
        indices = array("I", (copy.block.index for copy in copies))
        offsets = array("Q", (copy.offset for copy in copies))
        return Wanted(number, indices.tobytes(), offsets.tobytes()), refused

    def commit(self, ticket: WriteTicket, checksums: "array[int]") -> list[Block]:
        """End a ticket: register and return the blocks with a checksum, drop the others."""
        del self.tickets[ticket.number]
        written: list[Block] = []
        for index, copy in enumerate(ticket.copies):
            if index < len(checksums) and copy.state is CopyState.STAGED:
                self._store.register(copy, checksums[index])
                written.append(copy.block)
            else:
                self._store.drop(copy)
        self.staged -= sum(copy.block.space.slot_bytes for copy in ticket.copies)
        self._store.release(*reversed(ticket.copies))
        self._store.counts.written += len(written)
        return written

    def _refusal(self, prompt: PromptBlocks, index: int, thinking: int) -> str:
        """Reason to refuse this block and all after it; empty if there is none."""
        if self._retention.is_closed(prompt.session):
            return "closed"
        if index >= thinking:
            return "thinking"
        if (
            index
            and not prompt.space.layout.window
            and prompt.digests[index - 1] not in self._store.blocks
        ):
            return "orphan"
        if self.staged and self.staged + prompt.space.slot_bytes > self._max_staged:
            return "busy"
        return ""

    def _stage(self, block: Block, request: str | None) -> Copy | None:
        copy = self._store.reserve(block, ARENA, request)
        if copy is not None:
            self.staged += block.space.slot_bytes
        return copy


def _trailing_thinking(prompt: PromptBlocks, wishes: dict[int, RetentionWish]) -> int:
    """Index of the first of the reasoning blocks at the end; earlier ones are in use."""
    first = len(prompt)
    while first and wishes.get(first - 1, NO_WISH).level == THINKING_LEVEL:
        first -= 1
    return first
