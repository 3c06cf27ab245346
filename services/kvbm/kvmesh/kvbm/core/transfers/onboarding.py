"""Onboarding: read tickets, by which workers load the cached prefixes of their prompts."""

from array import array
from collections import Counter
from typing import NamedTuple

from kvmesh.bus.messages import Fetch, Fetched
from kvmesh.kvbm.core.blocks.block import ARENA
from kvmesh.kvbm.core.blocks.load_cost import EngineSpeed
from kvmesh.kvbm.core.blocks.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.announcing import ComputeAnnouncer
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress
from kvmesh.kvbm.core.transfers.loadable_prefix import Found, LoadablePrefix
from kvmesh.kvbm.core.transfers.loading import BlockLoader
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.tickets import ReadTicket

LOOKUP_BLOCKS = 4096
PREPARE_BLOCKS = 64
ANSWER_S = 0.5  # a worker without a reply for twice as long continues without the kvbm


class Lookup(NamedTuple):
    """Query beyond this node for a prompt's blocks from `first` on.

    Without `peer`, the query counts blocks in the remote store and in the arenas of peers; with
    `peer`, blocks that the peer has made ready.
    """

    ticket: int
    prompt: PromptBlocks
    first: int
    engine: EngineSpeed
    peer: PeerSource | None = None

    @property
    def digests(self) -> list[bytes]:
        end = self.first + LOOKUP_BLOCKS
        if self.peer is not None:
            end = min(self.peer.end, self.first + PREPARE_BLOCKS)
        return self.prompt.digests[self.first : end]


class Onboarding:
    """All read tickets of the node."""

    def __init__(
        self,
        store: Store,
        in_progress: BlocksInProgress,
        announcer: ComputeAnnouncer,
    ) -> None:
        self._store = store
        self._in_progress = in_progress
        self._announcer = announcer
        self._prefix = LoadablePrefix(store, in_progress)
        self._loader = BlockLoader(store, in_progress, announcer)
        self._parked: set[int] = set()
        self._lookups: list[Lookup] = []
        self.tickets: dict[int, ReadTicket] = {}

    # tickets

    def start(
        self,
        number: int,
        message: Fetch,
        prompt: PromptBlocks,
        engine: EngineSpeed,
        found: Found,
        beyond: bool = True,
    ) -> ReadTicket:
        """Start a ticket, parked until it is `due`; `beyond` allows lookups beyond this node.

        `found` are the prompt's blocks.
        """
        request = (message.attachment, message.request)
        store = self._store
        held = max(0, min(message.held, len(prompt)))
        # what a window has left behind will not be read again
        in_use = found[held:] if prompt.space.layout.window else found
        store.touch(in_use)
        end = self._prefix.end(prompt, found, held, request, message.wait_s > 0)
        chosen = held + self._prefix.worth_loading(
            prompt, engine, found[held:end], message.overlaps
        )
        ticket = ReadTicket(
            number,
            message.attachment,
            prompt,
            request if message.computes else None,
            engine,
            held,
            chosen,
            message.wait_s,
            store.now,
            overlaps=message.overlaps,
        )
        self.tickets[number] = ticket
        self.park(ticket, store.now + message.wait_s)
        self._count_uses(in_use[: len(in_use) - len(found) + held])
        self._count_hits(found[held:chosen])
        if beyond and chosen == end and self._prefix.is_lookup_worthwhile(ticket):
            self._start_lookup(ticket)
        self._announcer.announce(ticket)
        self._loader.advance(ticket)
        return ticket

    def park(self, ticket: ReadTicket, until: float) -> None:
        """Hold back the reply until the ticket is due, at most ANSWER_S."""
        ticket.parked_until = min(until, self._store.now + ANSWER_S)
        self._parked.add(ticket.number)

    def answer(self, ticket: ReadTicket) -> Fetched:
        """The reply with the ready blocks. An issued ticket stays until the worker finishes it."""
        first, given = ticket.next_index, ticket.ready
        self._store.note_read(given)
        ticket.given += given
        if given and ticket.given_at is None:
            ticket.given_at = self._store.now
        ticket.next_index += len(given)
        ticket.ready, ticket.parked_until = [], None
        self._parked.discard(ticket.number)
        sources = ticket.sources
        tiers = [sources.pop(first + i, ARENA) if sources else ARENA for i in range(len(given))]
        for tier, count in Counter(tiers).items():
            self._store.counts.onboarded[tier] += count
        ticket.issued = ticket.issued or bool(ticket.given or ticket.pending)
        return Fetched(
            ticket.number if ticket.issued else 0,
            array("Q", (copy.offset for copy in given)).tobytes(),
            array("Q", (copy.checksum for copy in given)).tobytes(),
            bytes(tiers),
            ticket.pending,
        )

    def finish(self, ticket: ReadTicket) -> None:
        """End a ticket and release its copies."""
        del self.tickets[ticket.number]
        self._parked.discard(ticket.number)
        self._loader.finish(ticket)

    def drain_due(self) -> list[ReadTicket]:
        """The parked tickets whose replies are due."""
        due = [t for n in self._parked if (t := self.tickets[n]).due(self._store.now)]
        self._parked.difference_update(ticket.number for ticket in due)
        return due

    def wake(self, digests: list[bytes] | set[bytes]) -> None:
        """Advance the tickets that wait for these blocks."""
        self._loader.wake(digests)

    def expire(self) -> None:
        """Shorten the tickets that timed out."""
        for ticket in list(self.tickets.values()):
            self._loader.expire(ticket)

    # lookups beyond the node

    @property
    def pending_lookups(self) -> int:
        """Number of tickets with a pending lookup."""
        return sum(ticket.lookup_pending for ticket in self.tickets.values())

    def drain_lookups(self) -> list[Lookup]:
        """Lookups to run, each of which is to be ended with `end_lookup`."""
        lookups, self._lookups = self._lookups, []
        return lookups

    def end_lookup(self, lookup: Lookup, count: int, peer: PeerSource | None) -> None:
        """Record that the first `count` blocks exist, and that `peer` may have more of them."""
        ticket = self.tickets.get(lookup.ticket)
        if ticket is None or not ticket.lookup_pending:
            return
        ticket.lookup_pending = False
        if count or ticket.peer is None:
            ticket.last_progress = self._store.now
        existing = ticket.prompt.digests[ticket.end : ticket.end + count]
        end = self._extend(ticket, existing)
        if ticket.end == end < len(ticket.prompt):
            self._continue_lookup(ticket, lookup, peer)
        if not ticket.lookup_pending:
            self._announcer.announce(ticket)
        self.wake(existing)
        self._loader.advance(ticket)

    def _extend(self, ticket: ReadTicket, existing: list[bytes]) -> int:
        """Extend a ticket by blocks held off-node; return the end of the available prefix."""
        store, prompt, start = self._store, ticket.prompt, ticket.end
        for index, digest in enumerate(existing, start):
            store.add_remote(store.blocks.get(digest) or prompt.block(index), prompt.request)
        self._in_progress.remove(existing, store.now)
        found = store.find(prompt.digests[start:])
        end = self._prefix.end(prompt, found, start, ticket.request, ticket.wait_s > 0)
        chosen = self._prefix.worth_loading(prompt, ticket.engine, found[: end - start])
        self._count_hits(found[:chosen])
        ticket.end = start + chosen
        return end

    def _start_lookup(self, ticket: ReadTicket, peer: PeerSource | None = None) -> None:
        ticket.lookup_pending = True
        ticket.peer = peer or ticket.peer
        lookup = Lookup(ticket.number, ticket.prompt, ticket.end, ticket.engine, peer)
        self._lookups.append(lookup)

    def _continue_lookup(self, ticket: ReadTicket, last: Lookup, peer: PeerSource | None) -> None:
        """Query the node that may have more blocks, or the one that computes them.

        If that node gives up, start a lookup without a peer; other waiting tickets do the same.
        """
        if ticket.wait_s <= 0 or ticket.timed_out(self._store.now):
            return
        if last.peer is not None and peer is None:
            self._announcer.drop_peer_claims(last.peer.instance, ticket)
            self._start_lookup(ticket)
            self._announcer.announce(ticket)
        elif (peer := peer or self._announcer.claimant(ticket)) is not None:
            self._store.counts.peer_waits += ticket.peer is None
            self._start_lookup(ticket, peer)

    # counters

    def _count_uses(self, found: Found) -> None:
        for block in found:
            if block is not None:
                block.frequency.hit(self._store.now)

    def _count_hits(self, found: Found) -> None:
        """Count uses of blocks, and hits of their highest tiers."""
        self._count_uses(found)
        tiers = Counter(min(block.copies) for block in found if block is not None)
        for tier, count in tiers.items():
            self._store.counts.hits[tier] += count
