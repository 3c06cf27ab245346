"""Which sequences an engine step works on: continuous batching with chunked prefill."""

import heapq
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.decode_batch import DecodeBatch
from kvmesh.worker.enginecore.radix_tree import PrefixMatch
from kvmesh.worker.enginecore.retention_request import NOTHING
from kvmesh.worker.enginecore.sequence import Request, Sequence, SequenceState
from kvmesh.worker.enginecore.simulated_tiers import SimulatedTiers

log = logging.getLogger(__name__)
TIME_RESOLUTION_S = 1e-9
MOST_WORTH = 100
_RANK = attrgetter("rank")


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step. `watermark` is the share of blocks left free when admitting."""

    block_size: int = 16
    max_sequences: int = 256
    max_batched_tokens: int = 8192
    watermark: float = 0.01


class ScheduledChunk:
    """Prompt tokens of one sequence that a step computes."""

    __slots__ = ("sequence", "tokens")

    def __init__(self, sequence: Sequence, tokens: int) -> None:
        self.sequence = sequence
        self.tokens = tokens


class Vet(Protocol):
    """Sees to it that the hashes of a sequence name its own blocks only."""

    def before_match(self, sequence: Sequence) -> None:
        """The blocks of a prompt are going to be looked up."""
        ...

    def before_names(self, sequence: Sequence, blocks: int) -> None:
        """The first `blocks` blocks are full, some of which get their hashes now."""
        ...


class Scheduler:
    """Waiting → (arriving →) prefilling → decoding, higher priority first, then by arrival.

    When blocks run out, the sequence that would go last is preempted: it returns its blocks to the
    cache, goes back to waiting and later computes again what was evicted meanwhile.

    Without a `vet`, hashes are taken for what they say.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        tiers: SimulatedTiers,
        vet: Vet | None = None,
    ) -> None:
        self._vet = vet
        self.limits = limits
        self.blocks = blocks
        self.tiers = tiers
        self.waiting: list[tuple[int, int, Sequence]] = []
        self.arriving: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding = DecodeBatch()
        self.live: dict[str, Sequence] = {}
        self.waiting_count = 0
        self.preemptions = 0
        self._arrivals = 0
        self._reserve = int(limits.watermark * blocks.capacity)
        self._stuck_at: int | None = None

    @property
    def settled(self) -> bool:
        """Whether the batch stays as it is until one of its sequences ends or needs a block."""
        if self.arriving:
            return False
        return self._stuck_at is not None or not self.waiting_count

    @property
    def running(self) -> int:
        return len(self.live) - self.waiting_count

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that are queued or under way and not computed yet."""
        if len(self.decoding.members) == len(self.live):
            return 0
        under_way = self.prefilling + self.arriving
        if self.waiting_count:
            under_way += [s for _, _, s in self.waiting if s.state is SequenceState.WAITING]
        return sum([s.base + s.generated - s.computed for s in under_way])

    def submit(self, request: Request) -> Sequence:
        """Queue a request; its id must not be live."""
        sequence = Sequence(request, self._arrivals, self.limits.block_size)
        self._arrivals += 1
        self.live[request.id] = sequence
        self._enqueue(sequence)
        return sequence

    def abort(self, request: str) -> bool:
        """Drop a request wherever it is; False if it is not live."""
        sequence = self.live.get(request)
        if sequence is None:
            return False
        self.release(sequence, SequenceState.ENDED)
        return True

    def plan(self, now: float) -> list[ScheduledChunk]:
        """Give memory to this step's work: a token per decoding sequence, and these chunks."""
        preemptions = self.preemptions
        self.blocks.now = now
        if self.arriving:
            self._take_arrived(now)
        if self.decoding.needy:
            self._grant_room()
        chunks: list[ScheduledChunk] = []
        if not self.prefilling and not self.waiting:
            return chunks
        budget = self.limits.max_batched_tokens - len(self.decoding.members)
        for sequence in sorted(self.prefilling, key=_RANK):
            if sequence.state is SequenceState.PREFILLING and budget > 0:
                budget -= self._schedule(sequence, budget, chunks)
        if self.waiting and preemptions == self.preemptions:
            self._admit(now, budget, chunks)
        if preemptions == self.preemptions:
            return chunks
        return [chunk for chunk in chunks if chunk.sequence.state is SequenceState.PREFILLING]

    def release(self, sequence: Sequence, state: SequenceState) -> str | None:
        """Take a sequence out of the batch and return its blocks; it is live only if WAITING.

        What came of the directive for its answer, if that has ended and there is one.
        """
        if sequence.state is SequenceState.PREFILLING:
            self.prefilling.remove(sequence)
        elif sequence.state is SequenceState.DECODING:
            self.decoding.remove(sequence)
        elif sequence.state is SequenceState.ARRIVING:
            self.arriving.remove(sequence)
        else:
            self.waiting_count -= 1
        worth = min(max(0, sequence.request.priority), MOST_WORTH)
        if self.tiers.lower:
            self.tiers.store(sequence, worth, self.blocks.now)
        ends = state is SequenceState.ENDED and sequence.told_cached
        outcome = self._ask_for_answer(sequence) if ends else None
        self.blocks.destroy(sequence.private)
        self.blocks.deref(sequence.sequence[: sequence.held], worth)
        sequence.private = sequence.held = sequence.room = sequence.computed = 0
        sequence.state = state
        if state is SequenceState.ENDED:
            del self.live[sequence.request.id]
        return outcome

    def ask(self, sequence: Sequence) -> list[str] | None:
        """Note what is asked for a prompt that is in memory; what came of each directive for it."""
        sequence.asked_to = sequence.held
        asked, now = sequence.request.asked, self.blocks.now
        held = sequence.sequence[: sequence.held]
        outcomes = self.blocks.keeping.begin(held, sequence.sequence, asked, now)
        if asked is not None and self.tiers.lower:
            self.tiers.follow(asked.session, sequence.sequence, now)
        return outcomes

    def compute(self, sequence: Sequence, tokens: int) -> None:
        """Account for `tokens` more tokens in memory, promoting the blocks that they fill."""
        sequence.computed += tokens
        self.promote(sequence)

    def promote(self, sequence: Sequence) -> None:
        """Give the blocks that are full by now their identity."""
        first, full = sequence.held, sequence.computed // self.limits.block_size
        if full == first:
            return
        hashes = sequence.sequence
        if full > len(hashes):
            sequence.hash_to(full)
        if not first:
            self._part_from_others(sequence)
        if self._vet is not None:
            self._vet.before_names(sequence, full)
        parent = hashes[first - 1] if first else None
        request, new = sequence.request, slice(first, full)
        self.blocks.promote(parent, request.salt, hashes[new], sequence.local[new], request.tenant)
        sequence.private -= full - first
        sequence.held = full

    def stretches(self, steps: int) -> Iterator[tuple[int, int]]:
        """Cut the next decode steps where blocks fill up: how many steps, and blocks filled before.

        They are at most `steps` in all, up to the first block whose hash is not known yet or is
        here already, or behind which there is no room: the step after it must be planned.
        """
        size, room = self.limits.block_size, self.blocks.available
        filling = self.decoding.filling(steps)
        if len(filling) > 1:
            heapq.heapify(filling)
        at = filled = 0
        seen: set[int] = set()
        while filling and filling[0][0] < steps:
            place, arrival, block, sequence = filling[0]
            if place > at:
                yield place - at, filled
                at = place
            if filled == room or not self._is_new(sequence, block, seen):
                return
            filled += 1
            heapq.heapreplace(filling, (place + size, arrival, block + 1, sequence))
        yield steps - at, filled

    def refill(self, sequences: list[Sequence]) -> None:
        """Give room to members of the batch that filled blocks and went on meanwhile."""
        size = self.limits.block_size
        for sequence in sequences:
            if sequence.room < 0:
                blocks = -(sequence.room // size)
                self.blocks.allocate(blocks)
                sequence.private += blocks
                sequence.room += blocks * size

    def start_decoding(self, sequence: Sequence) -> None:
        """The prompt is in memory: from now on one token per step."""
        self.prefilling.remove(sequence)
        sequence.state = SequenceState.DECODING
        sequence.room = -sequence.computed % self.limits.block_size
        self.decoding.add(sequence)

    def _is_new(self, sequence: Sequence, block: int, seen: set[int]) -> bool:
        """Whether a block that a sequence fills is one that nobody holds, or fills before: `seen`.

        False also if its hash is not known yet.
        """
        hashes = sequence.sequence
        if block >= len(hashes) or hashes[block] in seen:
            return False
        seen.add(hashes[block])
        if block > sequence.held:
            return True  # no block is held without those before it
        return not self.blocks.continues(hashes[block - 1] if block else None, hashes[block])

    def _part_from_others(self, sequence: Sequence) -> None:
        """If another tenant's blocks have its hashes, give it hashes that nobody has."""
        hashes, tenant = sequence.sequence, sequence.request.tenant
        if not hashes:
            return
        if self.blocks.is_foreign(hashes[0], tenant) or self.tiers.is_foreign(hashes[0], tenant):
            log.warning("request %s has block hashes of another tenant", sequence.request.id)
            sequence.rename(0, secrets.randbits(64))

    def _ask_for_answer(self, sequence: Sequence) -> str | None:
        asked = sequence.request.asked
        if asked is None or not asked.segments:
            return None
        held = sequence.sequence[: sequence.held]
        return self.blocks.keeping.end(held, asked, self.blocks.now, sequence.asked_to)

    def _all_running(self) -> list[Sequence]:
        return [*self.arriving, *self.prefilling, *self.decoding.members]

    def _take_arrived(self, now: float) -> None:
        arrived = [s for s in self.arriving if s.ready_at <= now + TIME_RESOLUTION_S]
        for sequence in arrived:
            self.arriving.remove(sequence)
            self.compute(sequence, sequence.private * self.limits.block_size)
            if self.tiers.lower:
                asked = sequence.request.asked or NOTHING
                prefix = sequence.sequence[: sequence.held]
                self.tiers.hand_on(prefix, asked.tenant, self.blocks)
            sequence.state = SequenceState.PREFILLING
            self.prefilling.append(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if len(self.waiting) > 2 * self.waiting_count + 64:
            self.waiting = [e for e in self.waiting if e[2].state is SequenceState.WAITING]
            heapq.heapify(self.waiting)
        heapq.heappush(self.waiting, (*sequence.rank, sequence))
        self.waiting_count += 1
        self._stuck_at = None

    def _grant_room(self) -> None:
        for sequence in self.decoding.take_needy():
            if sequence.state is SequenceState.DECODING and self._secure(sequence, 1):
                self.decoding.grant(sequence, self.limits.block_size)

    def _schedule(self, sequence: Sequence, budget: int, chunks: list[ScheduledChunk]) -> int:
        computed = sequence.computed
        tokens = min(budget, sequence.length - computed)
        if not self._secure(sequence, sequence.blocks_for(computed + tokens)):
            return 0
        chunks.append(ScheduledChunk(sequence, tokens))
        return tokens

    def _secure(self, sequence: Sequence, count: int) -> bool:
        while not self.blocks.allocate(count):
            victim = max(self._all_running(), key=_RANK)
            self.release(victim, SequenceState.WAITING)
            self.preemptions += 1
            self._enqueue(victim)
            if victim is sequence:
                return False
        sequence.private += count
        return True

    def _admit(self, now: float, budget: int, chunks: list[ScheduledChunk]) -> None:
        while self.waiting and budget > 0 and self.running < self.limits.max_sequences:
            sequence = self.waiting[0][2]
            if sequence.state is not SequenceState.WAITING:
                heapq.heappop(self.waiting)
                continue
            way = self._admissible(sequence)
            if way is None:
                return
            heapq.heappop(self.waiting)
            self.waiting_count -= 1
            if self._begin(sequence, way, now):
                budget -= self._schedule(sequence, budget, chunks)

    def _admissible(self, sequence: Sequence) -> PrefixMatch | None:
        """What is cached of a prompt if all of it fits beside what runs, else None.

        A failed test waits for more memory.
        """
        running, available = self.running, self.blocks.available
        if running and self._stuck_at is not None and available <= self._stuck_at:
            return None
        self._part_from_others(sequence)
        if self._vet is not None:
            self._vet.before_match(sequence)
        way = self.blocks.find(sequence.reusable)
        needed = sequence.blocks_for(sequence.length) - way.held + way.inactive
        promised = sum([s.blocks_for(s.length) for s in self.arriving + self.prefilling])
        reserve = self._reserve if running else 0
        if needed + promised + reserve > available:
            self._stuck_at = available
            return None
        self._stuck_at = None
        return way

    def _begin(self, sequence: Sequence, way: PrefixMatch, now: float) -> bool:
        """Take what is cached; whether the rest can be computed at once."""
        size, hits = self.limits.block_size, way.held
        self.blocks.refer(way)
        found = self.tiers.find(sequence.reusable, hits, sequence.request.remote // size)
        sequence.held = hits
        sequence.computed = hits * size
        if sequence.cached is None:
            sequence.cached = found.tokens(size)
        if found.arriving or found.asked:
            self._secure(sequence, found.arriving)
            sequence.ready_at = self.tiers.fetch(found, now)
            sequence.state = SequenceState.ARRIVING
            self.arriving.append(sequence)
            return False
        sequence.state = SequenceState.PREFILLING
        self.prefilling.append(sequence)
        return True
