"""The block manager of a node: all decisions, without I/O; the caller passes the time in."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple, TypeAlias

import msgspec

from kvmesh.blocks.digests import split_digests
from kvmesh.bus.messages import (
    Attach,
    Await,
    Clear,
    Commit,
    Computed,
    Corrupt,
    Declined,
    Detach,
    Done,
    Fetch,
    Fetched,
    Finish,
    Incomplete,
    KvEvent,
    KvLayout,
    Offer,
    Pin,
    Prepare,
    Prepared,
    ReturnForecast,
    Wanted,
)
from kvmesh.kvbm.core.attachment import AttachedWorker, Attachments
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, Block, Space
from kvmesh.kvbm.core.blocks.events import dump
from kvmesh.kvbm.core.blocks.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd, Store
from kvmesh.kvbm.core.clearing import clear
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.errors import TooSmall
from kvmesh.kvbm.core.retention import TierRetention
from kvmesh.kvbm.core.returns import NodeReturns
from kvmesh.kvbm.core.transfers.announcing import ComputeAnnouncer
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress
from kvmesh.kvbm.core.transfers.lending import Lending
from kvmesh.kvbm.core.transfers.mesh_claims import Claims, PeerClaims, PeerSource
from kvmesh.kvbm.core.transfers.offload import Offload
from kvmesh.kvbm.core.transfers.onboarding import Lookup, Onboarding
from kvmesh.kvbm.core.transfers.restoring import Restoring
from kvmesh.kvbm.core.transfers.tickets import ReadTicket
from kvmesh.kvbm.core.transfers.write_through import OfferedBlocks

UNKNOWN = Declined("unknown", "there is no such attachment; attach again")
CLOSING = Declined("closing", "this block manager is leaving")
NO_TICKET = Declined("invalid", "there is no such ticket")


WorkerRequest: TypeAlias = Offer | Commit | Fetch | Await | Finish | Computed | Corrupt | Detach
Reply: TypeAlias = Wanted | Fetched | Incomplete | Done | Declined


class ParkedFetch(NamedTuple):
    """The reply for a ticket is sent later; a new request for the ticket replaces this one."""

    ticket: int


class Manager:
    """Handles the messages of workers and peers (`kvmesh.bus.messages.kvbm`).

    The caller drains moves, events and parked replies. `instance` identifies this kvbm to others.
    """

    def __init__(self, config: KvbmConfig, instance: str = "") -> None:
        self._numbers = count(1)
        self.closing = False
        self.store = Store(config.capacities, config.tenant_share, config.remote)
        self.attachments = Attachments(self.store)
        self.claims = Claims(config.patience_s)
        self.peer_claims = PeerClaims()
        self.in_progress = BlocksInProgress(config.patience_s, self.claims.end)
        self.returns = NodeReturns(self.store, config.expects_returns)
        self.retention = TierRetention(self.store, config.defaults, self.returns)
        self.write_through = OfferedBlocks(self.store, self.retention, self.returns)
        announcer = ComputeAnnouncer(
            self.store, self.in_progress, self.claims, self.peer_claims, instance
        )
        self.onboarding = Onboarding(self.store, self.in_progress, announcer)
        self.restoring = Restoring(self.store, self.returns)
        frequencies = {DISK: config.disk_frequency, REMOTE: config.remote_frequency}
        self.offloads = {
            tier: Offload(
                self.store,
                self.returns.savings,
                tier,
                frequency,
                config.max_moves,
            )
            for tier, frequency in frequencies.items()
            if tier in config.capacities or (tier == REMOTE and config.shares)
        }
        self.lending = Lending(
            self.store,
            self.onboarding,
            config.shares,
            self._numbers,
            self._consider_offload,
            lambda: self._advance(()),
        )

    # workers

    def attach(self, message: Attach, number: int) -> AttachedWorker | Declined:
        """Attach a worker under a new `number`."""
        if self.closing:
            return CLOSING
        if min(message.layout.block_size, message.layout.block_bytes) <= 0:
            return Declined("layout", f"{message.model}: its blocks have no tokens or no bytes")
        try:
            return self.attachments.add(message, number)
        except TooSmall as error:
            return Declined("layout", f"{message.model}: {error}")

    def detach(self, worker: AttachedWorker, now: float) -> int:
        """Detach a worker that is gone; end its tickets and return their number."""
        self.store.begin(now)
        if self.attachments.workers.pop(worker.number, None) is None:
            return 0
        for number in worker.tickets:
            self._end_ticket(number)
        self._advance(self.in_progress.end_attachment(worker.number))
        return len(worker.tickets)

    def answer(self, message: WorkerRequest, now: float) -> Reply | ParkedFetch:
        """The reply to any message but `Attach`; `drain_replies` returns parked replies."""
        worker = self.attachments.workers.get(message.attachment)
        if worker is None:
            return UNKNOWN
        if self.closing and isinstance(message, Offer | Fetch):
            return CLOSING
        self.store.begin(now)
        try:
            return self._answer(message, worker)
        except ValueError as error:
            return Declined("invalid", str(error))

    def _answer(self, message: WorkerRequest, worker: AttachedWorker) -> Reply | ParkedFetch:
        match message:
            case Offer() | Fetch():
                prompt = worker.prompt(message)
                if prompt is None:
                    return Incomplete()
                self.store.operation.request = prompt.request
                if isinstance(message, Offer):
                    return self._offer(message, prompt, worker)
                return self._fetch(message, prompt, worker)
            case Commit():
                return self._commit(message, worker)
            case Await():
                return self._await(message, worker)
            case Finish(_, ticket):
                return self._finish(ticket, worker)
            case Computed(_, request):
                self._advance(self.in_progress.end((worker.number, request)))
            case Corrupt(_, _, digests):
                dropped = self.store.drop_corrupt(split_digests(digests))
                self._advance(())
                return Done(dropped)
            case Detach():
                self.detach(worker, self.store.now)
        return Done()

    def _offer(self, message: Offer, prompt: PromptBlocks, worker: AttachedWorker) -> Wanted:
        alone = self.store.remote is None
        most = self.attachments.most_written(worker, self.store.now) if alone else None
        wanted, refused = self.write_through.start(next(self._numbers), message, prompt, most)
        if wanted.ticket:
            worker.tickets.add(wanted.ticket)
        self._advance(self.in_progress.remove(refused, self.store.now))
        return wanted

    def _commit(self, message: Commit, worker: AttachedWorker) -> Done | Declined:
        ticket = self.write_through.tickets.get(message.ticket)
        if ticket is None or ticket.attachment != worker.number:
            return NO_TICKET
        checksums = array("Q", message.checksums)
        self.store.operation.request = ticket.request
        worker.tickets.discard(message.ticket)
        written = self.write_through.commit(ticket, checksums)
        size = len(written) * worker.space.block_bytes
        worker.pace.end_write(size, ticket.since, self.store.now)
        self._advance(())
        return Done(len(written))

    def _fetch(
        self, message: Fetch, prompt: PromptBlocks, worker: AttachedWorker
    ) -> Fetched | ParkedFetch:
        engine = worker.speed(message, self.store.now)
        self.returns.savings.record(prompt.space, engine)
        self.retention.reopen(message.session)
        self.retention.follow(prompt)
        found = self.store.find(prompt.digests)
        ticket = self.onboarding.start(next(self._numbers), message, prompt, engine, found)
        worker.tickets.add(ticket.number)
        blocks = [block for block in found if block is not None]
        self.retention.apply(prompt, self.retention.wishes(prompt), blocks)
        self._consider_offload(blocks)
        self._advance(())
        return self._fetched(ticket)

    def _await(self, message: Await, worker: AttachedWorker) -> Fetched | ParkedFetch | Declined:
        ticket = self._read_ticket(message.ticket, worker)
        if ticket is None:
            return NO_TICKET
        self.onboarding.park(ticket, self.store.now + message.wait_s)
        self._advance(())
        return self._fetched(ticket)

    def _fetched(self, ticket: ReadTicket) -> Fetched | ParkedFetch:
        if not ticket.due(self.store.now):
            return ParkedFetch(ticket.number)
        retention = self.retention.inherited(ticket.ready)
        fetched = msgspec.structs.replace(self.onboarding.answer(ticket), retention=retention)
        if not fetched.ticket:
            self.attachments.workers[ticket.attachment].tickets.discard(ticket.number)
            self.onboarding.finish(ticket)
        return fetched

    def _finish(self, number: int, worker: AttachedWorker) -> Done | Declined:
        ticket = self._read_ticket(number, worker)
        if ticket is None:
            return NO_TICKET
        worker.tickets.discard(number)
        if ticket.given and not ticket.overlaps:  # those last as long as their prompts
            worker.doubt.end_load(ticket.paid(self.store.now), self.store.now)
        self.onboarding.finish(ticket)
        self._advance(())
        return Done(len(ticket.given))

    def _read_ticket(self, number: int, worker: AttachedWorker) -> ReadTicket | None:
        ticket = self.onboarding.tickets.get(number)
        return ticket if ticket is not None and ticket.attachment == worker.number else None

    def _end_ticket(self, number: int) -> None:
        write = self.write_through.tickets.get(number)
        if write is not None:
            self.write_through.commit(write, array("Q"))
        read = self.onboarding.tickets.get(number)
        if read is not None:
            self.onboarding.finish(read)

    # disk

    def restored_space(self, model: str, layout: KvLayout) -> Space | None:
        """The space of a layout from before a restart; None if its blocks do not fit."""
        try:
            return self.attachments.add_space(model, layout)
        except TooSmall:
            return None

    def restore(self, block: Block, offset: int, checksum: int) -> bool:
        """Register a block on disk from before a restart; False if it is known or misplaced."""
        if block.digest in self.store.blocks:
            return False
        return self.store.restore(block, DISK, offset, checksum)

    def resize_disk(self, capacity: int, now: float) -> int:
        """Change the disk's capacity; return the number of dropped blocks."""
        self.store.begin(now)
        dropped = self.store.tiers[DISK].resize(capacity)
        self._advance(())
        return dropped

    def give_up_disk(self) -> None:
        """Stop writing to disk; its blocks may still be read."""
        self.offloads[DISK].close()

    # control

    def clear(self, message: Clear, now: float) -> int:
        """Drop the selected blocks, also those in use; return their number."""
        self.store.begin(now)
        dropped = clear(self.store, message)
        self._advance(())
        return dropped

    def release(self, sessions: list[str], now: float) -> int:
        """End sessions; return the number of blocks dropped with them."""
        self.store.begin(now)
        dropped = self.retention.release(sessions)
        self._advance(())
        return dropped

    def pin(self, message: Pin, now: float) -> int:
        """Pin a prefix; return the number of its blocks here."""
        self.store.begin(now)
        return self.retention.pin(message)

    def unpin(self, name: str, now: float) -> int | None:
        """Remove a pin; return the number of its blocks, None if there is no such pin."""
        self.store.begin(now)
        return self.retention.unpin(name)

    def expect_returns(self, forecasts: Iterable[ReturnForecast], now: float) -> None:
        """Take forecasts, with `since` on the caller's clock."""
        self.store.begin(now)
        self._consider_offload(self.returns.expect(forecasts))
        self._advance(())

    def dump(self, rank: int) -> list[KvEvent]:
        """All blocks of a rank as events, starting with a `Cleared`."""
        return dump(rank, self.store.blocks.values())

    # other nodes

    def prepare(self, message: Prepare, now: float) -> Prepared | ParkedFetch:
        """The reply to another kvbm; `drain_replies` returns parked replies."""
        space = self.attachments.space(message.model, message.layout)
        reply = self.lending.prepare(message, space, now)
        return reply if isinstance(reply, Prepared) else ParkedFetch(reply.number)

    # results

    def end_moves(self, ends: Iterable[tuple[Move, MoveEnd]], now: float) -> None:
        """Record the results of moves from `Store.drain_moves`."""
        self.store.begin(now)
        for move, end in ends:
            self.store.end_move(move, end)
        self._advance(())

    def end_lookup(
        self, lookup: Lookup, count: int, now: float, peer: PeerSource | None = None
    ) -> None:
        """Record that the first `count` blocks of a lookup exist beyond this node.

        `peer` is a node that may make more of them ready.
        """
        self.store.begin(now)
        self.onboarding.end_lookup(lookup, count, peer)
        self._advance(())

    def tick(self, now: float) -> None:
        """Expire leases, claims, announcements and waits; apply forecasts that are due."""
        self.store.begin(now)
        if self.store.remote is not None:
            self.store.remote.expire()
        self.claims.renew(self.in_progress.requests, now)
        self.peer_claims.expire(now)
        self._consider_offload(self.returns.apply_due())
        self._advance(self.in_progress.expire(now))
        self.onboarding.expire()
        self.store.restored.review()
        if not self.closing:
            self.restoring.check()

    def drain_replies(self, now: float) -> dict[int, Fetched | Prepared]:
        """Replies to parked requests that are due, by ticket."""
        self.store.begin(now)
        replies: dict[int, Fetched | Prepared] = {}
        for ticket in self.onboarding.drain_due():
            lent = ticket in self.lending
            reply = self.lending.answer(ticket) if lent else self._fetched(ticket)
            if not isinstance(reply, ParkedFetch):
                replies[ticket.number] = reply
        return replies

    def _advance(self, digests: Iterable[bytes]) -> None:
        """Advance tickets that wait for these blocks or for changes in the arena; offload."""
        changed = list(digests)
        while changed or (changed := self.store.drain_arena_changes()):
            blocks = (self.store.blocks.get(digest) for digest in changed)
            ready = [block for block in blocks if block is not None and block.registered(ARENA)]
            self.in_progress.remove((block.digest for block in ready), self.store.now)
            self._consider_offload(ready)
            self.onboarding.wake(changed)
            changed = []
        for offload in self.offloads.values():
            offload.start_moves()

    def _consider_offload(self, blocks: Sequence[Block]) -> None:
        for offload in self.offloads.values():
            offload.consider(blocks)
