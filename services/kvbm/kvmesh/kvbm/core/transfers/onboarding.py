"""Onboarding: what of a prompt a worker gets, from which tier, and whom it waits for."""

from array import array
from collections import Counter
from typing import NamedTuple

from kvmesh.bus.messages import Fetch, Fetched
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, Block, Copy, CopyState
from kvmesh.kvbm.core.blocks.load_cost import EngineSpeed
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.in_progress import BlocksInProgress, Computer
from kvmesh.kvbm.core.transfers.loadable_prefix import Found, LoadablePrefix, block_size
from kvmesh.kvbm.core.transfers.mesh_claims import Claims, PeerClaims, PeerSource
from kvmesh.kvbm.core.transfers.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.transfers.tickets import ReadTicket

AHEAD_BYTES = 64 << 20
LEAST_AHEAD = 8
AHEAD_SHARE = 4
LOOKUP_BLOCKS = 4096
PREPARE_BLOCKS = 64
CLAIM_S = 0.1
ANSWER_S = 0.5  # a worker that hears nothing for twice as long goes on without the kvbm


class Lookup(NamedTuple):
    """How many of a prompt's blocks from `first` on are there beyond this node?

    With `further`, how many has that node made ready for this one?
    """

    ticket: int
    prompt: PromptBlocks
    first: int
    engine: EngineSpeed
    further: PeerSource | None = None

    @property
    def digests(self) -> list[bytes]:
        end = self.first + LOOKUP_BLOCKS
        if self.further is not None:
            end = min(self.further.end, self.first + PREPARE_BLOCKS)
        return self.prompt.digests[self.first : end]


class Onboarding:
    """All reading tickets. `name` is that of this node among those that may claim the same."""

    def __init__(
        self,
        store: Store,
        announced: BlocksInProgress,
        claims: Claims,
        others: PeerClaims,
        decay_s: float,
        name: str,
    ) -> None:
        self._store = store
        self._announced = announced
        self._claims = claims
        self._reach = LoadablePrefix(store, announced)
        self._others = others
        self._decay_s = decay_s
        self._name = name
        share = store.tiers[ARENA].slots.capacity // AHEAD_SHARE
        self._ahead_bytes = min(AHEAD_BYTES, share)
        self._blocked: dict[bytes, set[int]] = {}
        self._parked: set[int] = set()
        self._lookups: list[Lookup] = []
        self.readings: dict[int, ReadTicket] = {}

    def start(
        self, number: int, message: Fetch, prompt: PromptBlocks, found: Found, beyond: bool = True
    ) -> ReadTicket:
        """Begin a reading ticket, parked until it is `due`; may look `beyond` this node.

        `found` are the prompt's blocks.
        """
        computer = (message.attachment, message.request)
        store = self._store
        store.touch(found)
        held = max(0, min(message.held, len(prompt)))
        end = self._reach.end(prompt, found, held, computer, message.wait_s > 0)
        engine = EngineSpeed(message.compute_tps, message.load_bps)
        chosen = held + self._reach.worth(prompt, engine, found[held:end])
        reading = ReadTicket(
            number,
            message.attachment,
            prompt,
            computer if message.computes else None,
            engine,
            held,
            chosen,
            message.wait_s,
            store.now,
        )
        self.readings[number] = reading
        self.park(reading, store.now + message.wait_s)
        self._count(found[:held])
        self._count_hits(found[held:chosen])
        if beyond and chosen == end and self._reach.is_worth_a_lookup(reading):
            self._look(reading)
        self._announce(reading)
        self.advance(reading)
        return reading

    def take_lookups(self) -> list[Lookup]:
        """What to ask beyond this node; `found` is to be told of each."""
        taken, self._lookups = self._lookups, []
        return taken

    def found(self, lookup: Lookup, count: int, further: PeerSource | None) -> None:
        """The first `count` blocks of a lookup are there, and a node may have more of them."""
        reading = self.readings.get(lookup.ticket)
        if reading is None or not reading.looking:
            return
        reading.looking = False
        if count or reading.further is None:
            reading.moved = self._store.now
        there = reading.prompt.digests[reading.end : reading.end + count]
        end = self._extend(reading, there)
        if reading.end == end < len(reading.prompt):
            self._look_further(reading, lookup, further)
        if not reading.looking:
            self._announce(reading)
        self.poke(there)
        self.advance(reading)

    def _extend(self, reading: ReadTicket, there: list[bytes]) -> int:
        """These next blocks are beyond this node. Returns where they and what is here end."""
        store, prompt, start = self._store, reading.prompt, reading.end
        for index, digest in enumerate(there, start):
            store.remember(store.blocks.get(digest) or prompt.block(index))
        self._announced.settled(there, store.now)
        found = store.find(prompt.digests[start:])
        end = self._reach.end(prompt, found, start, reading.computer, reading.patience_s > 0)
        chosen = self._reach.worth(prompt, reading.engine, found[: end - start])
        self._count_hits(found[:chosen])
        reading.end = start + chosen
        return end

    def _look(self, reading: ReadTicket, further: PeerSource | None = None) -> None:
        reading.looking = True
        reading.further = further or reading.further
        lookup = Lookup(reading.number, reading.prompt, reading.end, reading.engine, further)
        self._lookups.append(lookup)

    def _look_further(self, reading: ReadTicket, last: Lookup, further: PeerSource | None) -> None:
        """Ask the node that has more, or the one that computes it.

        If it gives up, look around again: the others who waited for it do so, too.
        """
        if reading.patience_s <= 0 or self._is_impatient(reading):
            return
        if last.further is not None and further is None:
            self._others.drop(last.further.owner, reading.prompt, reading.end)
            self._look(reading)
            self._announce(reading)
        elif (further := further or self._claimed(reading)) is not None:
            self._store.counts.further += reading.further is None
            self._look(reading, further)

    def _claimed(self, reading: ReadTicket) -> PeerSource | None:
        """Who computes what follows, unless this request has claimed it first."""
        further = self._others.find(reading.prompt, reading.end)
        mine = self._claims.first(reading.computer)
        if further is None or (
            mine is not None and mine <= reading.end and self._name < further.owner
        ):
            return None
        return further

    @property
    def looking(self) -> int:
        """Tickets for which a lookup runs."""
        return sum(reading.looking for reading in self.readings.values())

    def park(self, reading: ReadTicket, until: float) -> None:
        """The worker waits for more of it; it is answered by then, or soon, and may ask again."""
        reading.parked = min(until, self._store.now + ANSWER_S)
        self._parked.add(reading.number)

    def answer(self, reading: ReadTicket) -> Fetched:
        """Give what is ready. A ticket that the worker knows stays until it is given back."""
        first, taken = reading.next, reading.ready
        reading.given += taken
        reading.next += len(taken)
        reading.ready, reading.parked = [], None
        self._parked.discard(reading.number)
        sources = reading.sources
        tiers = [sources.pop(first + i, ARENA) if sources else ARENA for i in range(len(taken))]
        for tier, count in Counter(tiers).items():
            self._store.counts.onboarded[tier] += count
        reading.known = reading.known or bool(reading.given or reading.pending)
        return Fetched(
            reading.number if reading.known else 0,
            array("Q", (copy.offset for copy in taken)).tobytes(),
            array("Q", (copy.checksum for copy in taken)).tobytes(),
            bytes(tiers),
            reading.pending,
        )

    def finish(self, reading: ReadTicket) -> None:
        """Nothing of it is used any more."""
        del self.readings[reading.number]
        self._parked.discard(reading.number)
        self._unblock(reading)
        self._store.release(*reversed(reading.copies()))

    def take_due(self) -> list[ReadTicket]:
        """Whose workers should be answered now."""
        due = [r for n in self._parked if (r := self.readings[n]).due(self._store.now)]
        self._parked.difference_update(reading.number for reading in due)
        return due

    def poke(self, digests: list[bytes] | set[bytes]) -> None:
        """Something has become of these blocks: see who can go on."""
        for digest in [digest for digest in digests if digest in self._blocked]:
            for number in sorted(self._blocked.get(digest, ())):
                reading = self.readings[number]
                reading.moved = self._store.now
                self.advance(reading)

    def expire(self) -> None:
        """Who has waited long enough for others goes on alone."""
        for reading in list(self.readings.values()):
            if reading.blocked is not None and self._is_impatient(reading):
                self._let_go(reading)
                self.advance(reading)

    # what is counted and announced

    def _count(self, found: Found) -> None:
        """These are asked for."""
        now, decay_s = self._store.now, self._decay_s
        for block in found:
            if block is not None:
                block.uses.hit(now, decay_s)

    def _count_hits(self, found: Found) -> None:
        """These are asked for, and given."""
        self._count(found)
        tiers = Counter(min(block.copies) for block in found if block is not None)
        for tier, count in tiers.items():
            self._store.counts.hits[tier] += count

    def _announce(self, reading: ReadTicket) -> None:
        """Blocks after the end are computed by this request, unless somebody has them."""
        if reading.computer is None:
            return
        missing = [d for d in reading.prompt.digests[reading.end :] if d not in self._store.blocks]
        self._announced.add(reading.computer, missing, self._store.now)
        self._claim(reading, reading.computer, len(missing))

    def _claim(self, reading: ReadTicket, computer: Computer, missing: int) -> None:
        """Tell the other nodes, if they can have it and it takes longer than to ask for it."""
        prompt, first = reading.prompt, reading.end
        tokens, tps = missing * block_size(prompt), reading.engine.compute_tps
        if self._store.far is None or (missing and tps and tokens / tps < CLAIM_S):
            return
        if reading.looking and (further := self._others.find(prompt, first)) is not None:
            first = further.end
        self._claims.make(computer, prompt, first if missing else len(prompt), self._store.now)

    # on the way

    def advance(self, reading: ReadTicket) -> None:
        """Look ahead, and see what of it has come."""
        self._unblock(reading)
        self._settle(reading)
        if not reading.ahead:
            self._take_ready(reading)
        most = max(LEAST_AHEAD, self._ahead_bytes // reading.prompt.space.slot)
        while reading.reached < reading.end and len(reading.ahead) < most:
            copy = self._next(reading)
            if copy is None:
                break
            at_once = copy.ready and not reading.ahead
            (reading.ready if at_once else reading.ahead).append(copy)
        if reading.pending:
            self._block(reading)

    def _take_ready(self, reading: ReadTicket) -> None:
        """Use what follows and is in the arena."""
        copies: list[Copy] = []
        for digest in reading.prompt.digests.between(reading.reached, reading.end):
            block = self._store.blocks.get(digest)
            copy = block.ready(ARENA) if block is not None else None
            if copy is None:
                break
            copies.append(copy)
        self._store.hold(*copies)
        reading.ready += copies

    def _settle(self, reading: ReadTicket) -> None:
        """Move what has come from `ahead` to `ready`; what has gone is looked for again."""
        while reading.ahead and reading.ahead[0].ready:
            reading.ready.append(reading.ahead.popleft())
        if any(copy.state is CopyState.DROPPED for copy in reading.ahead):
            self._release_ahead(reading)

    def _next(self, reading: ReadTicket) -> Copy | None:
        """The copy of the next block, in use; None if it has to be waited for, or the end."""
        index = reading.reached
        block = self._store.blocks.get(reading.prompt.digests[index])
        copy = self._take(reading, block, index) if block is not None else None
        if copy is None and not self._comes(reading, index):
            self._cut(reading, index)
        return copy

    def _take(self, reading: ReadTicket, block: Block, index: int) -> Copy | None:
        copy = block.copies.get(ARENA)
        if copy is not None:
            self._store.hold(copy)
            return copy
        source = block.ready(DISK) or block.ready(REMOTE)
        target = self._store.reserve(block, ARENA) if source is not None else None
        if source is None or target is None:
            return None
        reading.sources[index] = source.tier
        self._store.move(source, target)
        self._store.hold(target)
        return target

    def _comes(self, reading: ReadTicket, index: int) -> bool:
        """Whether somebody else makes this block, and is still waited for."""
        computer = self._announced.by(reading.prompt.digests[index])
        if computer is None or computer == reading.computer:
            return False
        if self._is_impatient(reading):
            return False
        self._store.counts.waits += not reading.waited
        reading.waited = True
        return True

    def _is_impatient(self, reading: ReadTicket) -> bool:
        return self._store.now - reading.moved > reading.patience_s

    def _let_go(self, reading: ReadTicket) -> None:
        """Do without what another worker, or another node, should have made ready by now."""
        if reading.looking and reading.further is not None:
            self._cut(reading, reading.end)
        if reading.ahead and not reading.ahead[0].inbound:
            self._release_ahead(reading)
            self._cut(reading, reading.reached)

    def _release_ahead(self, reading: ReadTicket) -> None:
        while reading.ahead:
            self._store.release(reading.ahead.pop())

    def _cut(self, reading: ReadTicket, index: int) -> None:
        reading.end = index
        reading.looking = False
        self._announce(reading)

    # who waits for what

    def _block(self, reading: ReadTicket) -> None:
        reading.blocked = reading.prompt.digests[reading.next + len(reading.ready)]
        self._blocked.setdefault(reading.blocked, set()).add(reading.number)

    def _unblock(self, reading: ReadTicket) -> None:
        if reading.blocked is not None:
            waiting = self._blocked[reading.blocked]
            waiting.discard(reading.number)
            if not waiting:
                del self._blocked[reading.blocked]
            reading.blocked = None
