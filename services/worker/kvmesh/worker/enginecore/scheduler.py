"""Continuous batching with chunked prefill: selects the sequences of each engine step."""

import heapq
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from kvmesh.bus.messages import Retain, owner
from kvmesh.worker.enginecore.backward_load import BackwardLoad
from kvmesh.worker.enginecore.backward_loads import BackwardLoads
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.counters import variance
from kvmesh.worker.enginecore.decode_batch import DecodeBatch
from kvmesh.worker.enginecore.radix_tree import PrefixMatch
from kvmesh.worker.enginecore.retention_request import NO_RETENTION, inherited_retention
from kvmesh.worker.enginecore.sequence import Request, Sequence, SequenceState
from kvmesh.worker.enginecore.simulated_tiers import SimulatedTiers

log = logging.getLogger(__name__)
TIME_RESOLUTION_S = 1e-9
MAX_PRIORITY = 100
_SORT_KEY = attrgetter("sort_key")


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step; `watermark` is the share of blocks left free at admission."""

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


class HashGuard(Protocol):
    """Keeps block hashes of different prompts apart where they collide."""

    def before_match(self, sequence: Sequence) -> None:
        """Called before the blocks of a prompt are matched."""
        ...

    def before_promote(self, sequence: Sequence, blocks: int) -> None:
        """Called before the first `blocks` blocks are promoted under their hashes."""
        ...


class Scheduler:
    """Waiting → (loading →) prefilling → decoding, by priority (higher first), then by arrival.

    `backward` has the prefilling sequences whose last blocks are loaded meanwhile.
    When blocks run out, the sequence that is last in this order is preempted: it unlocks its
    blocks, waits again, and later computes again what was evicted meanwhile.

    Without a `guard`, equal hashes count as equal blocks. `waiting_tokens` are those of the
    `waiting_count` waiting sequences, of which nothing is computed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        tiers: SimulatedTiers,
        guard: HashGuard | None = None,
    ) -> None:
        self._guard = guard
        self.limits = limits
        self.blocks = blocks
        self.tiers = tiers
        self.waiting: list[tuple[int, int, Sequence]] = []
        self.loading: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.backward = BackwardLoads(limits.block_size, blocks, self.record_computed)
        self.decoding = DecodeBatch()
        self.live: dict[str, Sequence] = {}
        self.waiting_count = 0
        self.waiting_tokens = 0
        self._waiting_squares = 0
        self.preemptions = 0
        self._arrivals = 0
        self._reserve = int(limits.watermark * blocks.capacity)
        self._rejected_at: int | None = None

    @property
    def settled(self) -> bool:
        """True if the batch does not change until a sequence ends or needs a block."""
        if self.loading or self.backward.sequences:
            return False
        return self._rejected_at is not None or not self.waiting_count

    @property
    def running(self) -> int:
        return len(self.live) - self.waiting_count

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens, queued or in progress, that are not computed yet."""
        pending = self.prefilling + self.loading
        started = sum([s.prompt_length + s.generated - s.computed for s in pending])
        ahead = sum([s.ahead_blocks for s in self.backward.sequences])
        return started - ahead * self.limits.block_size + self.waiting_tokens

    @property
    def waiting_variance(self) -> float:
        """The variance of the waiting sequences' lengths, in tokens squared; 0 if none waits."""
        return variance(self.waiting_count, self.waiting_tokens, self._waiting_squares)

    def submit(self, request: Request) -> Sequence:
        """Queue a request; its id must not be live."""
        sequence = Sequence(request, self._arrivals, self.limits.block_size)
        self._arrivals += 1
        self.live[request.id] = sequence
        self._enqueue(sequence)
        return sequence

    def abort(self, request: str) -> bool:
        """Drop a request in any state; False if it is not live."""
        sequence = self.live.get(request)
        if sequence is None:
            return False
        self.remove(sequence, SequenceState.ENDED)
        return True

    def take_arrived(self, now: float) -> None:
        """Between steps: let sequences continue behind the blocks that have arrived for them."""
        self.blocks.now = now
        for sequence in self.backward.sequences[:]:
            self.backward.take_arrived(sequence, now)

    def schedule_next_batch(self, now: float) -> list[ScheduledChunk]:
        """Allocate blocks for the next step; return its prompt chunks.

        The step also computes one token for each decoding sequence.
        """
        preemptions = self.preemptions
        self.blocks.now = now
        if self.loading:
            self._finish_loading(now)
        if self.decoding.out_of_slots:
            self._allocate_decode_blocks()
        chunks: list[ScheduledChunk] = []
        if not self.prefilling and not self.waiting:
            return chunks
        self.backward.recheck_at = -1.0
        budget = self.limits.max_batched_tokens - len(self.decoding.members)
        self._schedule_prefilling(now, budget, chunks, True)
        budget -= sum([chunk.tokens for chunk in chunks])
        if self.waiting and preemptions == self.preemptions:
            self._admit(now, budget, chunks)
        if not chunks and not self.decoding.members and self.backward.sequences:
            self._schedule_prefilling(now, budget, chunks, False)
        if preemptions == self.preemptions:
            return chunks
        return [chunk for chunk in chunks if chunk.sequence.state is SequenceState.PREFILLING]

    def remove(self, sequence: Sequence, state: SequenceState) -> str | None:
        """Take a sequence out of the batch and unlock its blocks; with state WAITING it stays live.

        Return the outcome of the directive for its output if the sequence ended and had one.
        """
        if sequence.state is SequenceState.PREFILLING:
            self.prefilling.remove(sequence)
        elif sequence.state is SequenceState.DECODING:
            self.decoding.remove(sequence)
        elif sequence.state is SequenceState.LOADING:
            self.loading.remove(sequence)
        else:
            self._count_waiting(sequence, -1)
        priority = min(max(0, sequence.request.priority), MAX_PRIORITY)
        if self.tiers.lower and not sequence.request.ephemeral:
            self.tiers.store(sequence, priority, self.blocks.now)
        ends = state is SequenceState.ENDED and sequence.cached_reported
        outcome = self._claim_output(sequence) if ends else None
        self.backward.end(sequence)
        held = sequence.sequence_hashes[: sequence.full_blocks]
        self.blocks.free_private(sequence.private_blocks)
        self.blocks.unlock(held, priority)
        sequence.private_blocks = sequence.full_blocks = sequence.free_slots = sequence.computed = 0
        sequence.state = state
        if state is SequenceState.ENDED:
            del self.live[sequence.request.id]
        return outcome

    def lock_held(self, sequence: Sequence) -> None:
        """Let a sequence that waits for a kvbm continue from the blocks held now."""
        if self._guard is not None:
            self._guard.before_match(sequence)
        before = sequence.sequence_hashes[: sequence.full_blocks]
        sequence.full_blocks = self.blocks.lock_prefix(sequence.reusable)
        self.blocks.unlock(before)
        sequence.computed = sequence.full_blocks * self.limits.block_size

    def begin_backward(self, sequence: Sequence, now: float) -> BackwardLoad:
        """Let a sequence that waits for a kvbm compute while its last blocks are loaded."""
        self.lock_held(sequence)
        self.loading.remove(sequence)
        self.record_computed(sequence, sequence.private_blocks * self.limits.block_size)
        if not sequence.cached_reported:
            sequence.cached = [sequence.computed]
        sequence.ready_at = now
        sequence.state = SequenceState.PREFILLING
        self.prefilling.append(sequence)
        return self.backward.begin(sequence, now)

    def inherit_claims(self, sequence: Sequence, retention: list[Retain]) -> None:
        """Apply the claims that loaded blocks bring along; `retention` is in tokens."""
        if not sequence.full_blocks:
            return
        tenant = owner(sequence.request.tenant)
        claims = inherited_retention(retention, self.limits.block_size, tenant)
        held = sequence.sequence_hashes[: sequence.full_blocks]
        self.blocks.retention.claim_inherited(held, claims, self.blocks.now)

    def claim_prompt(self, sequence: Sequence) -> list[str] | None:
        """Apply the claims of a request to its computed prompt; return their outcomes."""
        sequence.claimed_blocks = sequence.full_blocks
        claims, now = sequence.request.retention, self.blocks.now
        held = sequence.sequence_hashes[: sequence.full_blocks]
        self.blocks.request = sequence.request.id
        outcomes = self.blocks.retention.start_request(held, sequence.sequence_hashes, claims, now)
        self.blocks.request = None
        if claims is not None and self.tiers.lower:
            self.tiers.record_prompt(claims, sequence.sequence_hashes, now)
        return outcomes

    def record_computed(self, sequence: Sequence, tokens: int) -> None:
        """Record `tokens` more tokens in memory and promote the blocks that they fill."""
        sequence.computed += tokens
        self.promote(sequence)

    def promote(self, sequence: Sequence) -> None:
        """Promote the blocks that are full by now under their hashes."""
        first, full = sequence.full_blocks, sequence.computed // self.limits.block_size
        if full == first:
            return
        hashes = sequence.sequence_hashes
        if full > len(hashes):
            sequence.hash_blocks(full)
        if not first:
            self._rehash_if_foreign(sequence)
        if self._guard is not None:
            self._guard.before_promote(sequence, full)
        parent = hashes[first - 1] if first else None
        request, new = sequence.request, slice(first, full)
        self.blocks.promote(
            parent, request.salt, hashes[new], sequence.local_hashes[new], request.tenant
        )
        sequence.private_blocks -= full - first
        sequence.full_blocks = full

    def decode_spans(self, steps: int) -> Iterator[tuple[int, int]]:
        """Split the next decode steps where blocks fill up.

        Yields (steps, blocks filled before them), at most `steps` steps in total. The spans end
        before a block whose hash is unknown or held already, and when no free block is left: the
        step after them must be scheduled.
        """
        size, free = self.limits.block_size, self.blocks.available
        filling = self.decoding.filling(steps)
        if len(filling) > 1:
            heapq.heapify(filling)
        at = filled = 0
        seen: set[int] = set()
        while filling and filling[0][0] < steps:
            step, arrival, block, sequence = filling[0]
            if step > at:
                yield step - at, filled
                at = step
            if filled == free or not self._is_new(sequence, block, seen):
                return
            filled += 1
            heapq.heapreplace(filling, (step + size, arrival, block + 1, sequence))
        yield steps - at, filled

    def allocate_overrun(self, sequences: list[Sequence]) -> None:
        """Allocate the blocks of members that filled their block and continued within the span."""
        size = self.limits.block_size
        for sequence in sequences:
            if sequence.free_slots < 0:
                blocks = -(sequence.free_slots // size)
                self.blocks.allocate(blocks, sequence.request.id)
                sequence.private_blocks += blocks
                sequence.free_slots += blocks * size

    def start_decoding(self, sequence: Sequence) -> None:
        """Move a sequence with a computed prompt into the decode batch."""
        self.prefilling.remove(sequence)
        sequence.state = SequenceState.DECODING
        sequence.free_slots = -sequence.computed % self.limits.block_size
        self.decoding.add(sequence)

    def _is_new(self, sequence: Sequence, block: int, seen: set[int]) -> bool:
        """True if a block that a sequence fills is neither held nor in `seen`.

        False if its hash is not known yet. `seen` has the blocks filled earlier in the span.
        """
        hashes = sequence.sequence_hashes
        if block >= len(hashes) or hashes[block] in seen:
            return False
        seen.add(hashes[block])
        if block > sequence.full_blocks:
            return True  # no block is held without those before it
        return not self.blocks.holds_child(hashes[block - 1] if block else None, hashes[block])

    def _rehash_if_foreign(self, sequence: Sequence) -> None:
        """Give a sequence fresh hashes if blocks of another tenant have the same ones."""
        hashes, tenant = sequence.sequence_hashes, sequence.request.tenant
        if not hashes:
            return
        if self.blocks.is_foreign(hashes[0], tenant) or self.tiers.is_foreign(hashes[0], tenant):
            log.warning("request %s has block hashes of another tenant", sequence.request.id)
            sequence.rehash(0, secrets.randbits(64))

    def _claim_output(self, sequence: Sequence) -> str | None:
        claims = sequence.request.retention
        if claims is None or not claims.segments:
            return None
        held = sequence.sequence_hashes[: sequence.full_blocks]
        return self.blocks.retention.finish_request(
            held, claims, self.blocks.now, sequence.claimed_blocks
        )

    def end_loading(self, sequence: Sequence, now: float) -> None:
        """Let a sequence that waits for a kvbm continue at `now` without blocks from there."""
        if sequence.state is not SequenceState.LOADING:
            return
        self.lock_held(sequence)
        if not sequence.cached_reported:
            sequence.cached = [sequence.computed]
        sequence.ready_at = now

    def _finish_loading(self, now: float) -> None:
        arrived = [s for s in self.loading if s.ready_at <= now + TIME_RESOLUTION_S]
        for sequence in arrived:
            self.loading.remove(sequence)
            self.record_computed(sequence, sequence.private_blocks * self.limits.block_size)
            if self.tiers.lower:
                claims = sequence.request.retention or NO_RETENTION
                prefix = sequence.sequence_hashes[: sequence.full_blocks]
                self.tiers.hand_over_retention(prefix, claims.tenant, self.blocks)
            sequence.state = SequenceState.PREFILLING
            self.prefilling.append(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if len(self.waiting) > 2 * self.waiting_count + 64:
            self.waiting = [e for e in self.waiting if e[2].state is SequenceState.WAITING]
            heapq.heapify(self.waiting)
        heapq.heappush(self.waiting, (*sequence.sort_key, sequence))
        self._count_waiting(sequence, 1)
        self._rejected_at = None

    def _count_waiting(self, sequence: Sequence, sign: int) -> None:
        length = sequence.prompt_length + sequence.generated
        self.waiting_count += sign
        self.waiting_tokens += sign * length
        self._waiting_squares += sign * length * length

    def _allocate_decode_blocks(self) -> None:
        for sequence in self.decoding.take_out_of_slots():
            if sequence.state is SequenceState.DECODING and self._allocate_or_preempt(sequence, 1):
                self.decoding.grant_slots(sequence, self.limits.block_size)

    def _schedule_prefilling(
        self, now: float, budget: int, chunks: list[ScheduledChunk], busy: bool
    ) -> None:
        for sequence in sorted(self.prefilling, key=_SORT_KEY):
            if sequence.state is not SequenceState.PREFILLING or budget <= 0:
                continue
            load = sequence.arriving
            if load is None:
                budget -= self._schedule_chunk(sequence, budget, chunks)
                continue
            tokens = self.backward.chunk(sequence, now, busy)
            if tokens:
                tokens = self._schedule_chunk(sequence, min(budget, tokens), chunks)
                load.front = sequence.computed + tokens
                load.front_at = now + tokens * self.backward.token_s
                budget -= tokens

    def _schedule_chunk(self, sequence: Sequence, budget: int, chunks: list[ScheduledChunk]) -> int:
        computed = sequence.computed
        tokens = min(budget, sequence.length - computed)
        if not self._allocate_or_preempt(sequence, sequence.blocks_needed(computed + tokens)):
            return 0
        chunks.append(ScheduledChunk(sequence, tokens))
        return tokens

    def _allocate_or_preempt(self, sequence: Sequence, count: int) -> bool:
        while not self.blocks.allocate(count, sequence.request.id):
            victim = max([*self.loading, *self.prefilling, *self.decoding.members], key=_SORT_KEY)
            self.remove(victim, SequenceState.WAITING)
            self.preemptions += 1
            self._enqueue(victim)
            if victim is sequence:
                return False
        sequence.private_blocks += count
        return True

    def _admit(self, now: float, budget: int, chunks: list[ScheduledChunk]) -> None:
        while self.waiting and budget > 0 and self.running < self.limits.max_sequences:
            sequence = self.waiting[0][2]
            if sequence.state is not SequenceState.WAITING:
                heapq.heappop(self.waiting)
                continue
            match = self._match_if_fits(sequence)
            if match is None:
                return
            heapq.heappop(self.waiting)
            self._count_waiting(sequence, -1)
            if self._start(sequence, match, now):
                budget -= self._schedule_chunk(sequence, budget, chunks)

    def _match_if_fits(self, sequence: Sequence) -> PrefixMatch | None:
        """The cached prefix of a prompt if the whole prompt fits, else None.

        After a failure the test is repeated only once more blocks are free.
        """
        running, available = self.running, self.blocks.available
        if running and self._rejected_at is not None and available <= self._rejected_at:
            return None
        self._rehash_if_foreign(sequence)
        if self._guard is not None:
            self._guard.before_match(sequence)
        match = self.blocks.match_prefix(sequence.reusable)
        needed = sequence.blocks_needed(sequence.length) - match.matched + match.inactive
        promised = sum([s.blocks_needed(s.length) for s in self.loading + self.prefilling])
        reserve = self._reserve if running else 0
        if needed + promised + reserve > available:
            self._rejected_at = available
            return None
        self._rejected_at = None
        return match

    def _start(self, sequence: Sequence, match: PrefixMatch, now: float) -> bool:
        """Lock the cached prefix; return whether the rest can be computed at once."""
        size, hits = self.limits.block_size, match.matched
        self.blocks.lock(match)
        lower = self.tiers.match_prefix(
            sequence.reusable, hits, sequence.request.remote_tokens // size
        )
        sequence.full_blocks = hits
        sequence.computed = hits * size
        if sequence.cached is None:
            sequence.cached = lower.tokens(size)
            sequence.admitted_at = now
        missing, decoding = sequence.length - sequence.computed, len(self.decoding.members)
        queried = lower.kvbm_queried and self.backward.pays_lookup(missing, decoding)
        if lower.loadable or queried:
            self._allocate_or_preempt(sequence, lower.loadable)
            sequence.ready_at = self.tiers.load(lower, now)
            sequence.state = SequenceState.LOADING
            self.loading.append(sequence)
            return False
        sequence.state = SequenceState.PREFILLING
        self.prefilling.append(sequence)
        return True
