"""One rank of the torch engine: scheduler, block manager and model, advanced step by step.

`plan` and `commit` run on the event loop, which owns all state; `run` computes in a thread in
between. Blocks of requests aborted during `run` are not reused before the next plan.
"""

import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kvmesh.blocks.digests import DigestChain
from kvmesh.bus.messages import KvEvent, Work
from kvmesh.hashing import DIGEST_BYTES, TOKEN_BYTES
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.counters import EngineCounters
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.enginecore.retention_request import parse_retention
from kvmesh.worker.enginecore.scheduler import Scheduler, SchedulerLimits
from kvmesh.worker.enginecore.sequence import Request, Sequence, SequenceState, hash_prompt
from kvmesh.worker.enginecore.simulated_tiers import SimulatedTiers, TierOptions
from kvmesh.worker.engines.torch.blocks.collision_guard import CollisionGuard, PrefixFingerprints
from kvmesh.worker.engines.torch.blocks.physical_blocks import PhysicalBlocks
from kvmesh.worker.engines.torch.model.batch import BatchRow
from kvmesh.worker.engines.torch.model.paged_model import PagedModel
from kvmesh.worker.engines.torch.model.sampling import SampledToken, Sampler

log = logging.getLogger(__name__)


class EngineRequest:
    """Tokens (prompt and output) and sampler of one request.

    `work` is the request without its tokens; `max_output` bounds the tokens of the output. For the
    lower tiers: whether the prompt has been looked up there, the number of leading blocks offered
    for write-through during the `attachment`-th attachment to them, and the chain of block digests.
    """

    __slots__ = (
        "attachment",
        "digest_chain",
        "fingerprints",
        "looked_up",
        "max_output",
        "offered_blocks",
        "prompt_length",
        "sampler",
        "tokens",
        "work",
    )

    def __init__(
        self, work: Work, sampler: Sampler, limit: int, fingerprints: PrefixFingerprints
    ) -> None:
        self.tokens = array("I", work.tokens)
        self.prompt_length = len(self.tokens) - work.generated
        self.sampler = sampler
        self.max_output = limit
        self.work = replace(work, tokens=b"")
        self.fingerprints = fingerprints
        self.digest_chain: DigestChain | None = None
        self.looked_up = False
        self.offered_blocks = 0
        self.attachment = 0

    def slice(self, start: int, stop: int) -> list[int]:
        """Tokens `start` … `stop - 1` of the output."""
        return self.tokens[self.prompt_length + start : self.prompt_length + stop].tolist()


class StepEntry(NamedTuple):
    """Work of a step for one sequence: a chunk of its prompt, or one decode token."""

    sequence: Sequence
    request: EngineRequest
    row: BatchRow
    is_decode: bool


@dataclass
class TorchStep:
    """A planned step; `run` fills `sampled` with a token per entry that wants logits."""

    entries: list[StepEntry]
    sampled: list[SampledToken]


class LowerTierHooks(Protocol):
    """Interface of the core to the lower tiers."""

    @property
    def available(self) -> bool:
        """True if sequences wait for blocks from there, until `Scheduler.end_loading`."""
        ...

    def on_filled(self, request: EngineRequest, sequence: Sequence) -> None:
        """Offer the leading `sequence.full_blocks` blocks of a request for write-through."""
        ...


class TorchCore:
    """State of one rank; only `run` may be called in another thread."""

    def __init__(
        self,
        model: PagedModel,
        limits: SchedulerLimits,
        blocks: int,
        context: int,
        retention: RetentionOptions,
    ) -> None:
        self.model = model
        self.limits = limits
        self.context = context
        self.blocks = BlockManager(blocks, retention)
        self._defaults = retention.defaults
        self.physical_blocks = PhysicalBlocks(blocks)
        self.scheduler = Scheduler(
            limits,
            self.blocks,
            SimulatedTiers(
                TierOptions(), limits.block_size, 1.0, self.blocks, self._has_lower_tiers
            ),
            self,
        )
        self.guard = CollisionGuard(model.layout)
        self.lower_tiers: LowerTierHooks | None = None
        self.counters = EngineCounters()
        self._requests: dict[str, EngineRequest] = {}

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.live)

    def submit(self, work: Work, sampler: Sampler) -> None:
        """Queue a request. Raises ValueError if its id is live or it can never fit."""
        if work.request in self.scheduler.live:
            raise ValueError(f"{work.request} is already live")
        fingerprints = self.guard.fingerprints(work)
        engine_request = EngineRequest(work, sampler, self.max_output(work), fingerprints)
        local, sequence, tail = hash_prompt(work.tokens, self.limits.block_size, work.salt)
        request = Request(
            id=work.request,
            length=len(engine_request.tokens),
            local_hashes=local,
            sequence_hashes=sequence,
            tail=tail,
            source=engine_request,
            target=engine_request.max_output,
            generated=work.generated,
            salt=work.salt,
            tenant=work.tenant,
            priority=work.priority,
            retention=parse_retention(work, self.limits.block_size, self._defaults),
        )
        self._requests[work.request] = engine_request
        self.scheduler.submit(request)
        self.counters.requests += 1
        self.counters.prompt_tokens += request.length

    def abort(self, request: str) -> bool:
        """Drop a request; False if it is not live. Its full blocks stay cached."""
        if not self.scheduler.abort(request):
            return False
        self._forget(request)
        self.counters.aborted += 1
        return True

    def plan(self, now: float) -> tuple[TorchStep, list[KvEvent]]:
        """Schedule the next step; returns it and the events of evicted blocks."""
        arriving = self.scheduler.backward.sequences[:]
        self.scheduler.take_arrived(now)
        for sequence in arriving:
            self.physical_blocks.block_table(sequence)
            self.physical_blocks.cache_full_blocks(sequence)
        chunks = self.scheduler.schedule_next_batch(now)
        events = self.take_events()
        self.physical_blocks.release_idle()
        members = self.scheduler.decoding.members
        entries = [self._entry(s, self._token_count(s) - 1, 1, True) for s in members]
        entries += [self._entry(c.sequence, c.sequence.computed, c.tokens, False) for c in chunks]
        return TorchStep(entries, []), events

    def run(self, step: TorchStep) -> None:
        """Compute the step's KV and sample its tokens."""
        logits = iter(self.model.forward([entry.row for entry in step.entries]))
        for entry in step.entries:
            if entry.row.wants_logits:
                index = entry.row.end - entry.request.prompt_length
                step.sampled.append(entry.request.sampler.sample(next(logits), index))

    def commit(self, step: TorchStep, seconds: float) -> tuple[list[OutputDelta], list[KvEvent]]:
        """Record the results of `run`; returns output for the callers, and KV events."""
        tokens = iter(step.sampled)
        results = [
            (entry, next(tokens) if entry.row.wants_logits else None) for entry in step.entries
        ]
        live = [
            (entry, sampled)
            for entry, sampled in results
            if entry.sequence.state is not SequenceState.ENDED
        ]
        for entry, sampled in live:
            if sampled is not None:
                entry.request.tokens.append(sampled.token)
        prefills = [(entry, sampled) for entry, sampled in live if not entry.is_decode]
        self._advance_decodes()
        for entry, sampled in prefills:
            self._advance_prefill(entry, sampled)
        if any(not entry.is_decode for entry in step.entries):
            self.counters.prefill_steps += 1
        else:
            self.scheduler.backward.step_s = seconds
        self.counters.count_steps(1, seconds)
        self._offer(entry for entry, _ in live)
        deltas = [self._output(entry, sampled) for entry, sampled in live if sampled is not None]
        return deltas, self.take_events()

    def request(self, sequence: Sequence) -> EngineRequest:
        """The request of a live sequence."""
        return self._requests[sequence.request.id]

    def take_events(self) -> list[KvEvent]:
        """KV events since the last call."""
        events = self.blocks.take_events()
        self.physical_blocks.apply(events)
        self.guard.apply(events)
        return events

    def before_match(self, sequence: Sequence) -> None:
        self._rehash_collisions(sequence, len(sequence.reusable))

    def before_promote(self, sequence: Sequence, blocks: int) -> None:
        fingerprints = self._rehash_collisions(sequence, blocks)
        first = sequence.full_blocks
        unclaimed = self.guard.count_unclaimed(
            sequence.sequence_hashes[first:blocks], fingerprints[first * DIGEST_BYTES :]
        )
        if first + unclaimed < blocks:
            log.warning("request %s: block hash collides with other tokens", sequence.request.id)
            sequence.rehash(first + unclaimed, self.guard.new_seed())
        self.guard.record(
            sequence.sequence_hashes[first:blocks], fingerprints[first * DIGEST_BYTES :]
        )

    def _rehash_collisions(self, sequence: Sequence, blocks: int) -> bytes:
        """Rehash the sequence from the first block whose hash is held for other tokens.

        Returns the fingerprints of its first `blocks` blocks.
        """
        request = self.request(sequence)
        fingerprints = request.fingerprints.upto(request.tokens, blocks)
        held = self.blocks.match_prefix(sequence.sequence_hashes[:blocks]).matched
        matching = self.guard.count_matching(sequence.sequence_hashes[:held], fingerprints)
        if matching < held:
            log.warning("request %s: block hash collides with other tokens", sequence.request.id)
            sequence.rehash(matching, self.guard.new_seed())
        return fingerprints

    def max_output(self, work: Work) -> int:
        """Longest possible output in tokens; raises ValueError if the request can never fit."""
        prompt = len(work.tokens) // TOKEN_BYTES - work.generated
        limit = min(work.sampling.max_tokens, self.context - prompt)
        if (
            prompt + limit > self.blocks.capacity * self.limits.block_size
            or limit <= work.generated
        ):
            raise ValueError(f"{work.request} does not fit into {self.blocks.capacity} blocks")
        return limit

    def _has_lower_tiers(self) -> bool:
        return self.lower_tiers is not None and self.lower_tiers.available

    def _offer(self, entries: Iterable[StepEntry]) -> None:
        if self.lower_tiers is not None and self.lower_tiers.available:
            for entry in entries:
                if entry.sequence.full_blocks > entry.request.offered_blocks:
                    self.lower_tiers.on_filled(entry.request, entry.sequence)

    def _token_count(self, sequence: Sequence) -> int:
        return len(self._requests[sequence.request.id].tokens)

    def _entry(self, sequence: Sequence, start: int, count: int, is_decode: bool) -> StepEntry:
        request = self._requests[sequence.request.id]
        block_ids = self.physical_blocks.block_table(sequence).block_ids
        wants_logits = start + count == len(request.tokens)
        row = BatchRow(request.tokens[start : start + count], start, block_ids, wants_logits)
        return StepEntry(sequence, request, row, is_decode)

    def _advance_decodes(self) -> None:
        batch = self.scheduler.decoding
        for sequence in batch.advance(1):
            self.scheduler.promote(sequence)
            self.physical_blocks.cache_full_blocks(sequence)
            if sequence.remaining:
                batch.resume(sequence)

    def _advance_prefill(self, entry: StepEntry, sampled: SampledToken | None) -> None:
        sequence = entry.sequence
        self.scheduler.record_computed(sequence, len(entry.row.tokens))
        self.counters.computed_tokens += len(entry.row.tokens)
        self.physical_blocks.cache_full_blocks(sequence)
        if sampled is not None:
            sequence.generated += 1
            if sequence.remaining:
                self.scheduler.start_decoding(sequence)

    def _output(self, entry: StepEntry, sampled: SampledToken) -> OutputDelta:
        sequence = entry.sequence
        self.counters.output_tokens += 1
        delta = OutputDelta(sequence.request.id, [sampled.token])
        if sampled.logprobs is not None:
            delta.logprobs = [sampled.logprobs]
        if not sequence.cached_reported:
            sequence.cached_reported = True
            delta.cached = sequence.cached
            delta.admitted_at = sequence.admitted_at
            delta.retention = self.scheduler.claim_prompt(sequence)
            self.counters.cached_tokens += sum(sequence.cached or ())
        if (
            sampled.stop
            or len(entry.request.tokens) - entry.request.prompt_length >= entry.request.max_output
        ):
            delta.finish = "stop" if sampled.stop else "length"
            if sampled.error:
                delta.finish, delta.error = "error", sampled.error
            delta.decode = self.scheduler.remove(sequence, SequenceState.ENDED)
            self._forget(sequence.request.id)
            self.counters.finished += 1
        return delta

    def _forget(self, request: str) -> None:
        del self._requests[request]
        self.physical_blocks.release(request)
