"""Loading of a read ticket's blocks into the arena, ahead of the worker that reads them."""

from operator import attrgetter

from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, Block, Copy, CopyState
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.announcing import ComputeAnnouncer
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress
from kvmesh.kvbm.core.transfers.tickets import ReadTicket

AHEAD_BYTES = 64 << 20
MIN_AHEAD_BLOCKS = 8
AHEAD_SHARE = 4
_number = attrgetter("number")


class BlockLoader:
    """Holds copies for tickets, starts moves into the arena, and wakes tickets that wait."""

    def __init__(
        self, store: Store, in_progress: BlocksInProgress, announcer: ComputeAnnouncer
    ) -> None:
        self._store = store
        self._in_progress = in_progress
        self._announcer = announcer
        share = store.tiers[ARENA].slots.capacity // AHEAD_SHARE
        self._ahead_bytes = min(AHEAD_BYTES, share)
        self._waiting: dict[bytes, set[ReadTicket]] = {}

    def advance(self, ticket: ReadTicket) -> None:
        """Collect loaded blocks and start loading more."""
        self._stop_waiting(ticket)
        self._collect_loaded(ticket)
        if not ticket.loading:
            self._collect_ready(ticket)
        limit = max(MIN_AHEAD_BLOCKS, self._ahead_bytes // ticket.prompt.space.slot_bytes)
        while ticket.loading_end < ticket.end and len(ticket.loading) < limit:
            copy = self._next(ticket)
            if copy is None:
                break
            at_once = copy.registered and not ticket.loading
            (ticket.ready if at_once else ticket.loading).append(copy)
        if ticket.pending:
            ticket.awaited = ticket.prompt.digests[ticket.next_index + len(ticket.ready)]
            self._waiting.setdefault(ticket.awaited, set()).add(ticket)

    def wake(self, digests: list[bytes] | set[bytes]) -> None:
        """Advance the tickets that wait for these blocks."""
        for digest in [digest for digest in digests if digest in self._waiting]:
            for ticket in sorted(self._waiting.get(digest, ()), key=_number):
                ticket.last_progress = self._store.now
                self.advance(ticket)

    def expire(self, ticket: ReadTicket) -> None:
        """Shorten a ticket that timed out to the blocks that are available.

        Blocks that are being loaded are given up once computing them would have been faster.
        """
        if ticket.awaited is None:
            return
        now, loads = self._store.now, bool(ticket.loading) and ticket.loading[0].inbound
        if loads and ticket.outwaited(now):
            self._store.counts.outwaited += len(ticket.loading)
            self._release_loading(ticket)
            self._cut(ticket, ticket.loading_end)
            self.advance(ticket)
            return
        if not ticket.timed_out(now):
            return
        if ticket.lookup_pending and ticket.peer is not None:
            self._cut(ticket, ticket.end)
        if ticket.loading and not ticket.loading[0].inbound:
            self._release_loading(ticket)
            self._cut(ticket, ticket.loading_end)
        self.advance(ticket)

    def finish(self, ticket: ReadTicket) -> None:
        """Release all copies of a ticket."""
        self._stop_waiting(ticket)
        self._store.release(*reversed(ticket.copies()))

    def _collect_ready(self, ticket: ReadTicket) -> None:
        """Hold the next blocks that are in the arena."""
        copies: list[Copy] = []
        for digest in ticket.prompt.digests.between(ticket.loading_end, ticket.end):
            block = self._store.blocks.get(digest)
            copy = block.registered(ARENA) if block is not None else None
            if copy is None:
                break
            copies.append(copy)
        self._store.hold(*copies)
        ticket.ready += copies

    def _collect_loaded(self, ticket: ReadTicket) -> None:
        """Move loaded copies to `ready`; release all loading copies if one was dropped."""
        while ticket.loading and ticket.loading[0].registered:
            ticket.ready.append(ticket.loading.popleft())
        if any(copy.state is CopyState.DROPPED for copy in ticket.loading):
            self._release_loading(ticket)

    def _next(self, ticket: ReadTicket) -> Copy | None:
        """The next block's copy, held for the ticket; None if it must wait or ends here."""
        index = ticket.loading_end
        block = self._store.blocks.get(ticket.prompt.digests[index])
        copy = self._hold_or_load(ticket, block, index) if block is not None else None
        if copy is None and not self._is_computed_elsewhere(ticket, index):
            self._cut(ticket, index)
        return copy

    def _hold_or_load(self, ticket: ReadTicket, block: Block, index: int) -> Copy | None:
        copy = block.copies.get(ARENA)
        if copy is not None:
            self._store.hold(copy)
            return copy
        source = block.registered(DISK) or block.registered(REMOTE)
        if source is None:
            return None
        target = self._store.reserve(block, ARENA, ticket.prompt.request)
        if target is None:
            return None
        ticket.sources[index] = source.tier
        self._store.move(source, target)
        self._store.hold(target)
        return target

    def _is_computed_elsewhere(self, ticket: ReadTicket, index: int) -> bool:
        """True if another request computes this block and the ticket still waits for it."""
        request = self._in_progress.request_of(ticket.prompt.digests[index])
        if request is None or request == ticket.request:
            return False
        if ticket.timed_out(self._store.now):
            return False
        self._store.counts.waits += not ticket.wait_counted
        ticket.wait_counted = True
        return True

    def _release_loading(self, ticket: ReadTicket) -> None:
        while ticket.loading:
            self._store.release(ticket.loading.pop())

    def _cut(self, ticket: ReadTicket, index: int) -> None:
        ticket.end = index
        ticket.lookup_pending = False
        self._announcer.announce(ticket)

    def _stop_waiting(self, ticket: ReadTicket) -> None:
        if ticket.awaited is not None:
            waiting = self._waiting[ticket.awaited]
            waiting.discard(ticket)
            if not waiting:
                del self._waiting[ticket.awaited]
            ticket.awaited = None
