"""One rank of the mock engine as a pure state machine: requests in, timed steps out.

It has no clock, no I/O and no randomness: the caller gives the start of each step and lets the
returned duration pass. A live worker and the simulator run the same code.
"""

import math
from dataclasses import dataclass, field

from kvmesh.bus.messages import Cleared, KvEvent, Load
from kvmesh.step_times.interface import DecodeLoad, StepModel
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.counters import EngineCounters
from kvmesh.worker.enginecore.rank_load import rank_load
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.enginecore.scheduler import ScheduledChunk, Scheduler, SchedulerLimits
from kvmesh.worker.enginecore.sequence import Request, Sequence, SequenceState
from kvmesh.worker.enginecore.simulated_tiers import SimulatedTiers, TierOptions
from kvmesh.worker.engines.mock.decode_plan import DecodePlan
from kvmesh.worker.engines.mock.node_tiers import NodeTiers
from kvmesh.worker.engines.mock.pace import Pace, PaceOptions
from kvmesh.worker.engines.mock.timing import PolynomialStepModel


@dataclass(slots=True)
class MockOutput:
    """New tokens of one request, from the `offset`-th token of its output on.

    The first output of a request has `cached`, the prompt tokens not computed, by tier, and
    `retention`, the outcome of each explicit directive for the prompt, and the times at which it
    was admitted and at which its KV from elsewhere arrived. The last one has `decode`, the outcome
    of the directive for the output.
    """

    request: str
    offset: int
    tokens: list[int]
    finish: str | None = None
    cached: list[int] | None = None
    retention: list[str] | None = None
    decode: str | None = None
    admitted_at: float | None = None
    loaded_at: float | None = None


class StepResult:
    """The result of `steps` engine steps of `duration` seconds in total, valid at their end.

    With no steps, the engine waits for KV to arrive; new requests may interrupt the wait.
    """

    __slots__ = ("duration", "events", "outputs", "steps")

    def __init__(
        self, duration: float, steps: int, outputs: list[MockOutput], events: list[KvEvent]
    ) -> None:
        self.duration = duration
        self.steps = steps
        self.outputs = outputs
        self.events = events


@dataclass(frozen=True)
class CoreOptions:
    """Parameters of the simulated engine; `speedup` divides every duration.

    Without `emit_tokens`, only the first and the last output of a request are made, and the last
    one is empty: enough for a simulation, at a cost independent of the number of tokens.
    """

    blocks: int = 16384
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    model: StepModel = field(default_factory=PolynomialStepModel)
    tiers: TierOptions = field(default_factory=TierOptions)
    speedup: float = 1.0
    emit_tokens: bool = True
    retention: RetentionOptions = field(default_factory=RetentionOptions)
    pace: PaceOptions = field(default_factory=PaceOptions)


class MockCore:
    """Block manager, scheduler and performance model of one rank, advanced by `step`.

    Injected faults multiply step times by `slowdown`. `node_tiers` is the kvbm of the node, if any.
    `seed` determines what of the engine's pace is random, `slower` has its present factors of
    prefill and decode.
    """

    def __init__(self, options: CoreOptions, seed: str = "") -> None:
        self.options = options
        self.blocks = BlockManager(options.blocks, options.retention)
        size, retention = options.limits.block_size, options.retention
        self.tiers = SimulatedTiers(
            options.tiers,
            size,
            options.speedup,
            self.blocks,
            self._has_node_tiers,
            retention=retention,
        )
        self.node_tiers: NodeTiers | None = None
        self.scheduler = Scheduler(options.limits, self.blocks, self.tiers)
        self.counters = EngineCounters()
        self.slowdown = 1.0
        steady = options.pace == PaceOptions()
        self._pace = None if steady else Pace(options.pace, seed)
        self.slower = 1.0, 1.0

    @property
    def block_managers(self) -> list[BlockManager]:
        """The block managers of the engine's memory and of the lower tiers."""
        return [self.blocks, *self.tiers.lower]

    @property
    def busy(self) -> bool:
        """True if any request is live."""
        return bool(self.scheduler.live)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits, prompt and output together."""
        return self.options.blocks * self.options.limits.block_size

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens, queued or in progress, that are not computed yet."""
        return self.scheduler.prefill_tokens

    def submit(self, request: Request) -> None:
        """Queue a request; raises ValueError if it can never fit or its id is live."""
        if request.length - request.generated + request.target > self.max_tokens:
            raise ValueError(f"{request.id} does not fit into {self.options.blocks} blocks")
        if request.id in self.scheduler.live:
            raise ValueError(f"{request.id} is already live")
        self.scheduler.submit(request)
        self.counters.requests += 1
        self.counters.prompt_tokens += request.length

    def abort(self, request: str) -> bool:
        """Drop a request at once; False if it is unknown. Its blocks stay cached."""
        known = self.scheduler.abort(request)
        self.counters.aborted += known
        return known

    def step(self, now: float, horizon: float = 0.0) -> StepResult:
        """Start the next step at `now`; the result is valid at `now + duration`.

        With `horizon`, steps that only decode and fill no block are taken together, as many as fit
        into that many seconds. The result equals that of single steps, in fewer calls.
        """
        self.scheduler.take_arrived(now)
        chunks = self.scheduler.schedule_next_batch(now)
        self._set_pace(now)
        return self._step(chunks, now, horizon)

    def plan(self, now: float, horizon: float) -> StepResult | DecodePlan:
        """Like `step`, but return steps that only decode as a plan of about `horizon` seconds.

        The caller passes the plan to `execute`, or the part of it up to a new arrival. Until then
        it may only call `submit`.
        """
        self.scheduler.take_arrived(now)
        chunks = self.scheduler.schedule_next_batch(now)
        self._set_pace(now)
        decoding = self.scheduler.decoding
        if chunks or not decoding.members or not self.scheduler.settled:
            return self._step(chunks, now, 0.0)
        spans: list[tuple[int, float]] = []
        active, steps, duration = self.blocks.active, 0, 0.0
        for count, filled in self.scheduler.decode_spans(decoding.steps_to_end()):
            seconds = self._decode_seconds(len(decoding.members), active + filled)
            spans.append((count, seconds))
            steps += count
            duration += count * seconds
            if duration >= horizon:
                break
        return DecodePlan(spans, steps, duration)

    def execute(self, plan: DecodePlan) -> StepResult:
        """Take the steps of a plan."""
        outputs: list[MockOutput] = []
        self._decode(plan.steps, outputs)
        self.counters.count_steps(plan.steps, plan.duration)
        self.scheduler.backward.step_s = plan.duration / plan.steps
        return StepResult(plan.duration, plan.steps, outputs, self.take_events())

    def _step(self, chunks: list[ScheduledChunk], now: float, horizon: float) -> StepResult:
        decoding = self.scheduler.decoding
        if not chunks and not decoding.members:
            return StepResult(self._seconds_until_loaded(now), 0, [], self.take_events())
        seconds = self._seconds(chunks, len(decoding.members)) * self.slowdown
        steps = 1 if chunks else self._repeatable_steps(seconds, horizon)
        outputs: list[MockOutput] = []
        self._decode(steps, outputs)
        for chunk in chunks:
            self._prefill(chunk, outputs)
        if chunks:
            self.counters.prefill_steps += 1
        else:
            self.scheduler.backward.step_s = seconds
        self.counters.count_steps(steps, seconds * steps)
        return StepResult(seconds * steps, steps, outputs, self.take_events())

    def _has_node_tiers(self) -> bool:
        return self.node_tiers is not None and self.node_tiers.available

    def load(self, instance: str, rank: int) -> Load:
        """The load of this core as rank `rank` of `instance`."""
        ratio = self.node_tiers.load_ratio if self.node_tiers is not None else 0.0
        return rank_load(instance, rank, self.scheduler, self.counters, ratio)

    def take_events(self) -> list[KvEvent]:
        """Return the KV events since the last call, of all tiers."""
        if not self.tiers.lower:
            return self.blocks.take_events()
        return [event for manager in self.block_managers for event in manager.take_events()]

    def dump(self) -> list[KvEvent]:
        """Return a `Cleared` and all full blocks, of all tiers."""
        return [
            Cleared(),
            *(event for manager in self.block_managers for event in manager.stored()),
        ]

    def _seconds_until_loaded(self, now: float) -> float:
        arrivals = [s.ready_at for s in self.scheduler.loading]
        if self.scheduler.backward.sequences:
            recheck_at = self.scheduler.backward.recheck_at
            arrivals.append(recheck_at if recheck_at >= 0.0 else math.inf)
        return max(0.0, min(arrivals) - now) if arrivals else 0.0

    def _seconds(self, chunks: list[ScheduledChunk], decoding: int) -> float:
        prefill = self.options.model.prefill(sum([chunk.tokens for chunk in chunks]))
        decode = self._decode_seconds(decoding, self.blocks.active) if decoding else 0.0
        return prefill * self.slower[0] / self.options.speedup + decode

    def _set_pace(self, now: float) -> None:
        """Set by how much the next steps are slower than the performance model says."""
        if self._pace is not None:
            self.slower = self._pace.factors(now, self.counters.busy_s)

    def _decode_seconds(self, sequences: int, blocks: int) -> float:
        size = self.options.limits.block_size
        load = DecodeLoad(sequences, blocks * size, self.blocks.capacity * size)
        return self.options.model.decode(load) * self.slower[1] / self.options.speedup

    def _repeatable_steps(self, seconds: float, horizon: float) -> int:
        if horizon <= seconds or not self.scheduler.settled:
            return 1
        return max(1, min(self.scheduler.decoding.steps_to_event(), int(horizon / seconds)))

    def _decode(self, steps: int, outputs: list[MockOutput]) -> None:
        batch = self.scheduler.decoding
        self.counters.output_tokens += steps * len(batch.members)
        if self.options.emit_tokens:
            outputs += [_output(s, batch.clock - s.synced_step, steps) for s in batch.members]
        full = batch.advance(steps)
        if full:
            self.scheduler.allocate_overrun(full)
        for sequence in full:
            self.scheduler.promote(sequence)
            if self.node_tiers is not None:
                self.node_tiers.on_filled(sequence)
            if sequence.remaining:
                batch.resume(sequence)
                continue
            if not self.options.emit_tokens:
                outputs.append(_last_output(sequence))
            self._finish(sequence, outputs)

    def _prefill(self, chunk: ScheduledChunk, outputs: list[MockOutput]) -> None:
        sequence = chunk.sequence
        self.scheduler.record_computed(sequence, chunk.tokens)
        self.counters.computed_tokens += chunk.tokens
        if self.node_tiers is not None:
            self.node_tiers.on_filled(sequence)
        if sequence.computed < sequence.length:
            return
        if self.node_tiers is not None:
            self.node_tiers.on_prompt(sequence)
        first = _output(sequence, 0, 1)
        outputs.append(first)
        sequence.generated += 1
        self.counters.output_tokens += 1
        if not sequence.cached_reported:
            sequence.cached_reported = True
            first.cached = sequence.cached
            first.admitted_at = sequence.admitted_at
            first.loaded_at = sequence.ready_at or None
            first.retention = self.scheduler.claim_prompt(sequence)
            self.counters.cached_tokens += sum(sequence.cached or ())
        if first.finish is None:
            self.scheduler.start_decoding(sequence)
        else:
            self._finish(sequence, outputs)

    def _finish(self, sequence: Sequence, outputs: list[MockOutput]) -> None:
        outcome = self.scheduler.remove(sequence, SequenceState.ENDED)
        self.counters.finished += 1
        if outcome is not None:
            last = next(o for o in reversed(outputs) if o.request == sequence.request.id)
            last.decode = outcome


def _output(sequence: Sequence, since: int, steps: int) -> MockOutput:
    """The output of `steps` steps, `since` steps after the sequence's progress was recorded."""
    request = sequence.request
    start = sequence.generated + since
    end = start + steps
    finish = request.finish if end >= request.target else None
    return MockOutput(request.id, start, request.source.slice(start, end), finish)


def _last_output(sequence: Sequence) -> MockOutput:
    request = sequence.request
    return MockOutput(request.id, sequence.generated, [], request.finish)
