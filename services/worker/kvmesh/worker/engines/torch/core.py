"""One rank of the torch engine: scheduler, block manager and model, advanced step by step.

A step is planned and committed on the event loop, where all books are kept, and run in a thread
in between. What is aborted meanwhile is computed for nothing; its blocks are not given away before
the next plan.
"""

import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kvmesh.blocks.digests import DIGEST_BYTES, DigestChain
from kvmesh.bus.messages import KvEvent, Work
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.counters import EngineCounters
from kvmesh.worker.enginecore.retention import RetentionOptions
from kvmesh.worker.enginecore.retention_request import parse_retention
from kvmesh.worker.enginecore.scheduler import Scheduler, SchedulerLimits
from kvmesh.worker.enginecore.sequence import Request, Sequence, SequenceState, hash_prompt
from kvmesh.worker.enginecore.simulated_tiers import SimulatedTiers, TierOptions
from kvmesh.worker.engines.torch.blocks.collision_guard import CollisionGuard, Prints
from kvmesh.worker.engines.torch.blocks.physical_blocks import SlotTable
from kvmesh.worker.engines.torch.model.batch import BatchRow
from kvmesh.worker.engines.torch.model.paged_model import PagedModel
from kvmesh.worker.engines.torch.model.sampling import Picked, Sampler

log = logging.getLogger(__name__)


class EngineRequest:
    """A request's tokens, prompt and answer, and how its next one is chosen.

    `work` is what was asked, less the tokens. Of the tiers below: whether they have been `asked`
    for the prompt, how many blocks have been `offered` to them, and the `chain` of their names.
    """

    __slots__ = (
        "asked",
        "base",
        "chain",
        "limit",
        "offered",
        "prints",
        "sampler",
        "tokens",
        "work",
    )

    def __init__(self, work: Work, sampler: Sampler, limit: int, prints: Prints) -> None:
        self.tokens = array("I", work.tokens)
        self.base = len(self.tokens) - work.generated
        self.sampler = sampler
        self.limit = limit
        self.work = replace(work, tokens=b"")
        self.prints = prints
        self.chain: DigestChain | None = None
        self.asked = False
        self.offered = 0

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens of the answer."""
        return self.tokens[self.base + start : self.base + stop].tolist()


class TokenTurn(NamedTuple):
    """What a step does for one sequence: compute a piece of its prompt, or decode."""

    sequence: Sequence
    job: EngineRequest
    row: BatchRow
    decodes: bool


@dataclass
class TorchStep:
    """A planned step; `picked` has a token for each turn whose row is its last."""

    turns: list[TokenTurn]
    picked: list[Picked]


class Lower(Protocol):
    """The tiers below, as the core sees them."""

    @property
    def present(self) -> bool:
        """Whether a sequence should wait for what they have; `settle` ends that."""
        ...

    def filled(self, job: EngineRequest, sequence: Sequence) -> None:
        """The leading `sequence.held` blocks of a job are full, more than it has offered."""
        ...


class TorchCore:
    """The books of one rank. `run` alone may be called in another thread."""

    def __init__(
        self,
        model: PagedModel,
        limits: SchedulerLimits,
        blocks: int,
        context: int,
        keeping: RetentionOptions,
    ) -> None:
        self.model = model
        self.limits = limits
        self.context = context
        self.blocks = BlockManager(blocks, keeping)
        self._defaults = keeping.defaults
        self.slots = SlotTable(blocks)
        self.scheduler = Scheduler(
            limits,
            self.blocks,
            SimulatedTiers(TierOptions(), limits.block_size, 1.0, self.blocks, self._can_ask),
            self,
        )
        self.guard = CollisionGuard(model.layout)
        self.lower: Lower | None = None
        self.counters = EngineCounters()
        self._jobs: dict[str, EngineRequest] = {}

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.live)

    def submit(self, work: Work, sampler: Sampler) -> None:
        """Queue a request. Raises ValueError if its id is live or it can never fit."""
        if work.request in self.scheduler.live:
            raise ValueError(f"{work.request} is already live")
        job = EngineRequest(work, sampler, self.limit(work), self.guard.prints(work))
        local, sequence, tail = hash_prompt(work.tokens, self.limits.block_size, work.salt)
        request = Request(
            id=work.request,
            length=len(job.tokens),
            local_hashes=local,
            sequence_hashes=sequence,
            tail=tail,
            source=job,
            target=job.limit,
            generated=work.generated,
            salt=work.salt,
            tenant=work.tenant,
            priority=work.priority,
            retention=parse_retention(work, self.limits.block_size, self._defaults),
        )
        self._jobs[work.request] = job
        self.scheduler.submit(request)
        self.counters.requests += 1
        self.counters.prompt_tokens += request.length

    def abort(self, request: str) -> bool:
        """Forget a request at once; False if it is not here. Its blocks stay cached."""
        if not self.scheduler.abort(request):
            return False
        self._forget(request)
        self.counters.aborted += 1
        return True

    def plan(self, now: float) -> tuple[TorchStep, list[KvEvent]]:
        """Give memory to the next step's work; also what was evicted for it."""
        chunks = self.scheduler.schedule_next_batch(now)
        events = self.take_events()
        self.slots.release_idle()
        members = self.scheduler.decoding.members
        turns = [self._turn(s, self._known(s) - 1, 1, True) for s in members]
        turns += [self._turn(c.sequence, c.sequence.computed, c.tokens, False) for c in chunks]
        return TorchStep(turns, []), events

    def run(self, step: TorchStep) -> None:
        """Compute the step's KV and choose its tokens."""
        logits = iter(self.model.forward([turn.row for turn in step.turns]))
        for turn in step.turns:
            if turn.row.last:
                index = turn.row.end - turn.job.base
                step.picked.append(turn.job.sampler.pick(next(logits), index))

    def commit(self, step: TorchStep, seconds: float) -> tuple[list[OutputDelta], list[KvEvent]]:
        """Take note of what `run` did: news for the callers, and what is stored now."""
        picked = iter(step.picked)
        done = [(turn, next(picked) if turn.row.last else None) for turn in step.turns]
        here = [
            (turn, choice)
            for turn, choice in done
            if turn.sequence.state is not SequenceState.ENDED
        ]
        for turn, choice in here:
            if choice is not None:
                turn.job.tokens.append(choice.token)
        begun = [(turn, choice) for turn, choice in here if not turn.decodes]
        self._pass_decode_step()
        for turn, choice in begun:
            self._prefill(turn, choice)
        self.counters.count_steps(1, seconds)
        self._offer(turn for turn, _ in here)
        deltas = [self._tell(turn, choice) for turn, choice in here if choice is not None]
        return deltas, self.take_events()

    def job(self, sequence: Sequence) -> EngineRequest:
        """What a live sequence says."""
        return self._jobs[sequence.request.id]

    def settle(self, sequence: Sequence, arrived: list[int]) -> None:
        """An arriving sequence goes on from what is held now; tokens `arrived` by their tier."""
        if sequence.state is not SequenceState.LOADING:
            return
        self.before_match(sequence)
        before = sequence.sequence_hashes[: sequence.full_blocks]
        sequence.full_blocks = self.blocks.lock_prefix(sequence.reusable)
        self.blocks.unlock(before)
        sequence.computed = sequence.full_blocks * self.limits.block_size
        if not sequence.cached_reported:
            tiers = [sequence.computed - sum(arrived[1:]), *arrived[1:]]
            while len(tiers) > 1 and not tiers[-1]:
                tiers.pop()
            sequence.cached = tiers
        sequence.ready_at = 0.0

    def take_events(self) -> list[KvEvent]:
        """What the cache gained and lost since the last call."""
        events = self.blocks.take_events()
        self.slots.follow(events)
        self.guard.follow(events)
        return events

    def before_match(self, sequence: Sequence) -> None:
        self._part_ways(sequence, len(sequence.reusable))

    def before_promote(self, sequence: Sequence, blocks: int) -> None:
        prints = self._part_ways(sequence, blocks)
        first = sequence.full_blocks
        free = self.guard.free(
            sequence.sequence_hashes[first:blocks], prints[first * DIGEST_BYTES :]
        )
        if first + free < blocks:
            log.warning("request %s has a block hash that other tokens have", sequence.request.id)
            sequence.rehash(first + free, self.guard.fresh_seed())
        self.guard.note(sequence.sequence_hashes[first:blocks], prints[first * DIGEST_BYTES :])

    def _part_ways(self, sequence: Sequence, blocks: int) -> bytes:
        """Where a block is held under a hash for other tokens, go on with other hashes."""
        job = self.job(sequence)
        prints = job.prints.upto(job.tokens, blocks)
        held = self.blocks.match_prefix(sequence.sequence_hashes[:blocks]).matched
        sound = self.guard.sound(sequence.sequence_hashes[:held], prints)
        if sound < held:
            log.warning("request %s has a block hash that other tokens have", sequence.request.id)
            sequence.rehash(sound, self.guard.fresh_seed())
        return prints

    def limit(self, work: Work) -> int:
        """Tokens of the answer at which it ends; raises ValueError if it can never fit."""
        base = len(work.tokens) // 4 - work.generated
        limit = min(work.sampling.max_tokens, self.context - base)
        if base + limit > self.blocks.capacity * self.limits.block_size or limit <= work.generated:
            raise ValueError(f"{work.request} does not fit into {self.blocks.capacity} blocks")
        return limit

    def _can_ask(self) -> bool:
        return self.lower is not None and self.lower.present

    def _offer(self, turns: Iterable[TokenTurn]) -> None:
        if self.lower is not None and self.lower.present:
            for turn in turns:
                if turn.sequence.full_blocks > turn.job.offered:
                    self.lower.filled(turn.job, turn.sequence)

    def _known(self, sequence: Sequence) -> int:
        return len(self._jobs[sequence.request.id].tokens)

    def _turn(self, sequence: Sequence, start: int, count: int, decodes: bool) -> TokenTurn:
        job = self._jobs[sequence.request.id]
        places = self.slots.table(sequence).places
        last = start + count == len(job.tokens)
        row = BatchRow(job.tokens[start : start + count], start, places, last)
        return TokenTurn(sequence, job, row, decodes)

    def _pass_decode_step(self) -> None:
        batch = self.scheduler.decoding
        for sequence in batch.advance(1):
            self.scheduler.promote(sequence)
            self.slots.name(sequence)
            if sequence.remaining:
                batch.resume(sequence)

    def _prefill(self, turn: TokenTurn, choice: Picked | None) -> None:
        sequence = turn.sequence
        self.scheduler.record_computed(sequence, len(turn.row.tokens))
        self.counters.computed_tokens += len(turn.row.tokens)
        self.slots.name(sequence)
        if choice is not None:
            sequence.generated += 1
            if sequence.remaining:
                self.scheduler.start_decoding(sequence)

    def _tell(self, turn: TokenTurn, choice: Picked) -> OutputDelta:
        sequence = turn.sequence
        self.counters.output_tokens += 1
        delta = OutputDelta(sequence.request.id, [choice.token])
        if choice.logprobs is not None:
            delta.logprobs = [choice.logprobs]
        if not sequence.cached_reported:
            sequence.cached_reported = True
            delta.cached = sequence.cached
            delta.retention = self.scheduler.claim_prompt(sequence)
            self.counters.cached_tokens += sum(sequence.cached or ())
        if choice.stop or len(turn.job.tokens) - turn.job.base >= turn.job.limit:
            delta.finish = "stop" if choice.stop else "length"
            if choice.fault:
                delta.finish, delta.error = "error", choice.fault
            delta.decode = self.scheduler.remove(sequence, SequenceState.ENDED)
            self._forget(sequence.request.id)
            self.counters.finished += 1
        return delta

    def _forget(self, request: str) -> None:
        del self._jobs[request]
        self.slots.release(request)
