"""The block manager of a node: every decision, without any I/O; seconds are passed in."""

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
    Wanted,
    encode,
)
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, Block, Space
from kvmesh.kvbm.core.blocks.events import dump
from kvmesh.kvbm.core.blocks.slab_allocator import PAGE
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd, Store
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.errors import TooSmall
from kvmesh.kvbm.core.retention import TierRetention
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress
from kvmesh.kvbm.core.transfers.lending import Lending
from kvmesh.kvbm.core.transfers.mesh_claims import Claims, PeerClaims, PeerSource
from kvmesh.kvbm.core.transfers.offload import Offload
from kvmesh.kvbm.core.transfers.onboarding import Lookup, Onboarding
from kvmesh.kvbm.core.transfers.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.transfers.tickets import ReadTicket
from kvmesh.kvbm.core.transfers.write_through import OfferedBlocks

UNKNOWN = Declined("unknown", "there is no such attachment; attach again")
CLOSING = Declined("closing", "this block manager is leaving")
NO_TICKET = Declined("invalid", "there is no such ticket")


Ask: TypeAlias = Offer | Commit | Fetch | Await | Finish | Computed | Corrupt | Detach
Answer: TypeAlias = Wanted | Fetched | Incomplete | Done | Declined


class ParkedFetch(NamedTuple):
    """The answer comes later; a new request about the ticket takes its place."""

    ticket: int


class Manager:
    """Answers the messages of `kvmesh.bus.messages`; what is to be done and told is taken after.

    `instance` is what other kvbms know it by.
    """

    def __init__(self, rules: KvbmConfig, instance: str = "") -> None:
        self._numbers = count(1)
        self.store = Store(rules.capacities, rules.budget, rules.remote)
        self.claims = Claims(rules.patience_s)
        self.others = PeerClaims()
        self.announced = BlocksInProgress(rules.patience_s, self.claims.end)
        self.keeping = TierRetention(self.store, rules.defaults)
        self.offers = OfferedBlocks(self.store, self.keeping)
        self.fetches = Onboarding(
            self.store, self.announced, self.claims, self.others, rules.decay_s, instance
        )
        frequencies = {DISK: rules.disk_frequency, REMOTE: rules.remote_frequency}
        self.offloads = {
            tier: Offload(self.store, tier, frequency, rules.decay_s, rules.moves)
            for tier, frequency in frequencies.items()
            if tier in rules.capacities or (tier == REMOTE and rules.shares)
        }
        self.lending = Lending(
            self.store,
            self.fetches,
            rules.shares,
            self._numbers,
            self._consider,
            lambda: self._go_on(()),
        )
        self.guests: dict[int, AttachedWorker] = {}
        self.models: list[str] = []
        self._spaces: dict[bytes, Space] = {}
        self.closing = False

    # workers

    def attach(self, message: Attach, number: int) -> AttachedWorker | Declined:
        """Take in a worker as `number`, which is new; the caller tells it where the arena is."""
        if self.closing:
            return CLOSING
        if min(message.layout.block_size, message.layout.block_bytes) <= 0:
            return Declined("layout", f"{message.model}: its blocks have no tokens or no bytes")
        try:
            space = self._space(message.model, message.layout)
        except TooSmall as error:
            return Declined("layout", f"{message.model}: {error}")
        guest = AttachedWorker(number, message.instance, space, message.lock)
        self.guests[guest.number] = guest
        return guest

    def detach(self, guest: AttachedWorker, now: float) -> int:
        """A worker is gone: what it used is used no more. Returns how many tickets it had."""
        self.store.begin(now)
        if self.guests.pop(guest.number, None) is None:
            return 0
        for number in guest.tickets:
            self._end(number)
        self._go_on(self.announced.end_attachment(guest.number))
        return len(guest.tickets)

    @property
    def layouts(self) -> int:
        """How many layouts of models there are or were."""
        return len(self._spaces)

    @property
    def most_blocks(self) -> list[int]:
        """How many blocks each tier can have, whatever their layout."""
        return self.store.most_blocks(min((s.slot for s in self._spaces.values()), default=PAGE))

    @property
    def in_use(self) -> dict[str, list[str]]:
        """The layouts of all workers by model, in words."""
        spaces = {guest.space for guest in self.guests.values()}
        models = sorted({space.model for space in spaces})
        return {m: sorted(s.words for s in spaces if s.model == m) for m in models}

    def _space(self, model: str, layout: KvLayout) -> Space:
        described = encode((model, layout))
        found = self._spaces.get(described)
        if found is None:
            rank = self.models.index(model) if model in self.models else len(self.models)
            found = Space(rank, model, layout)
            self.store.tiers[ARENA].check(found.slot)
            if rank == len(self.models):
                self.models.append(model)
            self._spaces[described] = found
        return found

    # the disk

    def restored_space(self, model: str, layout: KvLayout) -> Space | None:
        """The blocks of a layout that was here before a restart; None if they do not fit."""
        try:
            return self._space(model, layout)
        except TooSmall:
            return None

    def restore(self, block: Block, offset: int, checksum: int) -> bool:
        """Take in a block that is on disk from before a restart; False if it cannot be."""
        if block.digest in self.store.blocks:
            return False
        return self.store.restore(block, DISK, offset, checksum)

    def resize_disk(self, capacity: int, now: float) -> int:
        """The disk has fewer bytes, or more again; returns how many blocks had to go."""
        self.store.begin(now)
        gone = self.store.tiers[DISK].resize(capacity)
        self._go_on(())
        return gone

    def give_up_disk(self) -> None:
        """Nothing more is written to disk; what is there may be read."""
        self.offloads[DISK].close()

    # what workers ask

    def answer(self, message: Ask, now: float) -> Answer | ParkedFetch:
        """The reply to any message but `Attach`; or who gets it later, from `take_answers`."""
        guest = self.guests.get(message.attachment)
        if guest is None:
            return UNKNOWN
        if self.closing and isinstance(message, Offer | Fetch):
            return CLOSING
        self.store.begin(now)
        try:
            return self._answer(message, guest)
        except ValueError as error:
            return Declined("invalid", str(error))

    def _answer(self, message: Ask, guest: AttachedWorker) -> Answer | ParkedFetch:
        match message:
            case Offer() | Fetch():
                return self._describe(message, guest)
            case Commit():
                return self._commit(message, guest)
            case Await():
                return self._await(message, guest)
            case Finish(_, ticket):
                return self._finish(ticket, guest)
            case Computed(_, request):
                self._go_on(self.announced.end((guest.number, request)))
            case Corrupt(_, _, digests):
                return self._corrupt(digests)
            case Detach():
                self.detach(guest, self.store.now)
        return Done()

    def _describe(self, message: Offer | Fetch, guest: AttachedWorker) -> Answer | ParkedFetch:
        prompt = guest.prompt(message)
        if prompt is None:
            return Incomplete()
        if isinstance(message, Offer):
            return self._offer(message, prompt, guest)
        return self._fetch(message, prompt, guest)

    def _offer(self, message: Offer, prompt: PromptBlocks, guest: AttachedWorker) -> Wanted:
        wanted, unwanted = self.offers.start(next(self._numbers), message, prompt)
        if wanted.ticket:
            guest.tickets.add(wanted.ticket)
        self._go_on(self.announced.settled(unwanted, self.store.now))
        return wanted

    def _commit(self, message: Commit, guest: AttachedWorker) -> Done | Declined:
        writing = self.offers.writings.get(message.ticket)
        if writing is None or writing.attachment != guest.number:
            return NO_TICKET
        checksums = array("Q", message.checksums)
        guest.tickets.discard(message.ticket)
        written = self.offers.commit(writing, checksums)
        self._go_on(())
        return Done(len(written))

    def _fetch(
        self, message: Fetch, prompt: PromptBlocks, guest: AttachedWorker
    ) -> Fetched | ParkedFetch:
        self.keeping.reopen(message.session)
        self.keeping.follow(prompt)
        found = self.store.find(prompt.digests)
        reading = self.fetches.start(next(self._numbers), message, prompt, found)
        guest.tickets.add(reading.number)
        blocks = [block for block in found if block is not None]
        self.keeping.ask(prompt, self.keeping.wishes(prompt), blocks)
        self._consider(blocks)
        self._go_on(())
        return self._fetched(reading)

    def _await(self, message: Await, guest: AttachedWorker) -> Fetched | ParkedFetch | Declined:
        reading = self._reading(message.ticket, guest)
        if reading is None:
            return NO_TICKET
        self.fetches.park(reading, self.store.now + message.wait_s)
        self._go_on(())
        return self._fetched(reading)

    def _fetched(self, reading: ReadTicket) -> Fetched | ParkedFetch:
        if not reading.due(self.store.now):
            return ParkedFetch(reading.number)
        retention = self.keeping.inherited(reading.ready)
        fetched = msgspec.structs.replace(self.fetches.answer(reading), retention=retention)
        if not fetched.ticket:
            self.guests[reading.attachment].tickets.discard(reading.number)
            self.fetches.finish(reading)
        return fetched

    def _finish(self, ticket: int, guest: AttachedWorker) -> Done | Declined:
        reading = self._reading(ticket, guest)
        if reading is None:
            return NO_TICKET
        guest.tickets.discard(ticket)
        self.fetches.finish(reading)
        self._go_on(())
        return Done(len(reading.given))

    def _reading(self, ticket: int, guest: AttachedWorker) -> ReadTicket | None:
        reading = self.fetches.readings.get(ticket)
        return reading if reading is not None and reading.attachment == guest.number else None

    def _corrupt(self, digests: bytes) -> Done:
        bad = self.store.condemn(split_digests(digests))
        self._go_on(())
        return Done(bad)

    def _end(self, ticket: int) -> None:
        writing = self.offers.writings.get(ticket)
        if writing is not None:
            self.offers.commit(writing, array("Q"))
        reading = self.fetches.readings.get(ticket)
        if reading is not None:
            self.fetches.finish(reading)

    # what the mesh asks

    def clear(self, message: Clear, now: float) -> int:
        """Drop what nobody uses of what is meant; returns how many blocks that was."""
        self.store.begin(now)
        gone = sum(self._clear(block, message) for block in list(self.store.blocks.values()))
        self._go_on(())
        return gone

    def _clear(self, block: Block, message: Clear) -> bool:
        meant = message.salt, message.tenant
        if message.salt is not None and (block.salt, block.tenant) != meant:
            return False
        if message.model is not None and block.space.model != message.model:
            return False
        copies = [c for c in block.copies.values() if not message.tiers or c.tier in message.tiers]
        idle = [copy for copy in copies if not copy.users]
        for copy in idle:
            self.store.discard(copy)
        return bool(idle)

    def release(self, sessions: list[str], now: float) -> int:
        """These sessions are over; returns how many blocks went with them."""
        self.store.begin(now)
        gone = self.keeping.release(sessions)
        self._go_on(())
        return gone

    def pin(self, message: Pin, now: float) -> int:
        """Returns how many blocks of the prefix are here."""
        self.store.begin(now)
        return self.keeping.pin(message)

    def unpin(self, name: str, now: float) -> int | None:
        """Returns how many blocks it concerned; None if there is no such pin."""
        self.store.begin(now)
        return self.keeping.unpin(name)

    def dump(self, rank: int) -> list[KvEvent]:
        """All that a rank holds, beginning with a `Cleared`."""
        return dump(rank, self.store.blocks.values())

    # other nodes

    def prepare(self, message: Prepare, now: float) -> Prepared | ParkedFetch:
        """Another kvbm would have blocks; who gets the answer later, from `take_answers`."""
        space = self._spaces.get(encode((message.model, message.layout)))
        answer = self.lending.prepare(message, space, now)
        return answer if isinstance(answer, Prepared) else ParkedFetch(answer.number)

    # what comes of it

    def moved(self, ends: Iterable[tuple[Move, MoveEnd]], now: float) -> None:
        """Moves that `take_moves` gave have ended."""
        self.store.begin(now)
        for move, end in ends:
            self.store.moved(move, end)
        self._go_on(())

    def found(
        self, lookup: Lookup, count: int, now: float, further: PeerSource | None = None
    ) -> None:
        """Beyond this node are the first `count` blocks of a lookup that `take_lookups` gave.

        `further` is a node that may make more of them ready.
        """
        self.store.begin(now)
        self.fetches.found(lookup, count, further)
        self._go_on(())

    def tick(self, now: float) -> None:
        """Time passes: who has waited long enough goes on alone."""
        self.store.begin(now)
        if self.store.far is not None:
            self.store.far.expire()
        self.claims.renew(self.announced.computers, now)
        self.others.expire(now)
        self._go_on(self.announced.expire(now))
        self.fetches.expire()

    def take_answers(self, now: float) -> dict[int, Fetched | Prepared]:
        """Replies that were `ParkedFetch` and are due, by ticket."""
        self.store.begin(now)
        answers: dict[int, Fetched | Prepared] = {}
        for reading in self.fetches.take_due():
            lent = reading in self.lending
            answer = self.lending.answer(reading) if lent else self._fetched(reading)
            if not isinstance(answer, ParkedFetch):
                answers[reading.number] = answer
        return answers

    def _go_on(self, settled: Iterable[bytes]) -> None:
        """Let everybody who waits for something see whether it is there now."""
        waiting = list(settled)
        while waiting or (waiting := self.store.take_news()):
            here = [b for d in waiting if (b := self.store.blocks.get(d)) and b.ready(ARENA)]
            self.announced.settled((block.digest for block in here), self.store.now)
            self._consider(here)
            self.fetches.poke(waiting)
            waiting = []
        for offload in self.offloads.values():
            offload.pump()

    def _consider(self, blocks: Sequence[Block]) -> None:
        for offload in self.offloads.values():
            offload.consider(blocks)
