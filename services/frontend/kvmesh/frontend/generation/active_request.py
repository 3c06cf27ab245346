"""One request from placement to its last byte: its sequences, their answers, its renderer."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field

from kvmesh.bus.messages import Outcome, SeqFree, SeqPrefilled
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import AnswerSummary, Renderer, Usage
from kvmesh.frontend.apis.transcript import Transcript
from kvmesh.frontend.auth.accounts import Account
from kvmesh.frontend.dispatch.dispatcher import Dispatcher, SequenceTask
from kvmesh.frontend.dispatch.liveness import LivenessMonitor
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.token_inbox import TokenInbox
from kvmesh.frontend.dispatch.token_stream import Nobody, TokenStream
from kvmesh.frontend.generation.cache_expectations import CacheExpectations
from kvmesh.frontend.generation.choice import Choice
from kvmesh.frontend.generation.nvext import all_outcomes, extras, kept_for
from kvmesh.frontend.generation.output import OutputPipeline, Parser, PlainText
from kvmesh.frontend.http.sse import EventStream
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest

HOUR_S = 3600.0


@dataclass(frozen=True)
class RequestRuntime:
    """What an exchange works with; one per frontend."""

    dispatcher: Dispatcher
    inbox: TokenInbox
    monitor: LivenessMonitor
    tracker: SequenceEventPublisher
    route_timeout: float
    expectations: CacheExpectations = field(default_factory=CacheExpectations)


class ActiveRequest:
    """`async with` it: leaving it frees whatever still runs, for whatever reason."""

    def __init__(
        self,
        engine: RequestRuntime,
        prepared: PreparedRequest,
        renderer: Renderer,
        now: float,
        account: Account | None = None,
    ) -> None:
        self._engine = engine
        self._account = account
        self._started = now
        self._opened = False
        self.prepared = prepared
        self.renderer = renderer
        self.stream: EventStream | None = None
        self.last: list[bytes] = []
        self._choices: list[Choice] = []
        count = len(prepared.prompts) * prepared.request.n
        self.said = Transcript() if prepared.request.speculative and count == 1 else None
        self.jobs = [self._job(index, now) for index in range(count)]

    def _job(self, index: int, now: float) -> SequenceTask:
        request, dialect = self.prepared.request, self.prepared.model.dialect
        parser = _parser(self.prepared)
        answer = OutputPipeline(dialect.detokenizers.create(), request.sampling.stop, parser)
        texts = dialect.token_texts if request.sampling.logprobs is not None else None
        one_call = not request.parallel_tool_calls
        choice = Choice(self, index, answer, texts, one_call, self.said)
        self._choices.append(choice)
        name = f"{request.id}-{index}" if index else request.id
        prompt = self.prepared.prompts[index // request.n]
        sequence = TokenStream(name, choice, now)
        return SequenceTask(
            self.prepared, prompt, sequence, now + self._engine.route_timeout, index
        )

    def can_send(self) -> bool:
        """A stream must be open and its reader keep up; a whole answer is only gathered."""
        if self.stream is None:
            return not self.prepared.request.stream
        return self.stream.writable

    def send(self, frame: bytes) -> None:
        if self.stream is not None:
            self.stream.write(frame)

    def prefilled(self, sequence: TokenStream) -> None:
        model = self.prepared.model.card.name
        self._engine.tracker.event(model, SeqPrefilled(sequence.attempt))

    def opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        return self.renderer.started(self.usage())

    async def place(self) -> None:
        """Return once workers have taken every sequence; raises ApiError if they do not."""
        for job in self.jobs:
            self._engine.monitor.add(job)
        await _all([self._engine.dispatcher.place(job) for job in self.jobs])

    def resume(self) -> None:
        """Write what has gathered while the stream was closed or blocked."""
        for job in self.jobs:
            if not job.sequence.ended.is_set():
                job.sequence.consumer.ready(job.sequence)

    async def follow(self) -> None:
        """Return when every sequence has ended; raises the first error."""
        await _all([self._follow(job) for job in self.jobs])

    async def _follow(self, job: SequenceTask) -> None:
        await self._engine.dispatcher.follow(job)
        self.last.append(self._choices[job.index].finish(job.sequence))

    def usage(self) -> Usage:
        """Counts of the whole request; each prompt counts once, however many choices it has."""
        firsts = self.jobs[:: self.prepared.request.n]
        block = self.prepared.model.card.block_size
        cached = [sum(job.sequence.cached or []) for job in firsts]
        stored = [
            max(job.prompt.count // block * block - held, 0)
            for job, held in zip(firsts, cached, strict=True)
        ]
        lasting = [
            min(max(kept_for(job, HOUR_S) - held, 0), new)
            for job, held, new in zip(firsts, cached, stored, strict=True)
        ]
        return Usage(
            prompt=self.prepared.prompt_tokens,
            cached=sum(cached),
            stored=sum(stored),
            output=sum(len(job.sequence.tokens) for job in self.jobs),
            reasoning=sum(choice.reasoning_tokens for choice in self._choices),
            lasting=sum(lasting),
        )

    def summary(self) -> AnswerSummary:
        """What is known at the end; `nvext` only if the request asked for some of it."""
        wanted = self.prepared.request.extra_fields
        stopped = next((c.stopped_by for c in self._choices if c.stopped_by is not None), None)
        facts = extras(self.prepared, self.jobs, self._started, stopped) if wanted else None
        return AnswerSummary(self.usage(), facts)

    def spend(self, tokens: int) -> None:
        """Count tokens that are computed for it against the key that asked."""
        if self._account is not None:
            self._account.spend(tokens)

    async def __aenter__(self) -> "ActiveRequest":
        metrics.active.inc()
        self.spend(self.prepared.prompt_tokens)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        metrics.active.dec()
        self.spend(sum(len(job.sequence.tokens) for job in self.jobs))
        if kind is not None and issubclass(kind, asyncio.CancelledError | ConnectionError):
            metrics.cancellations.labels(self.prepared.model.card.name).inc()
        for job in self.jobs:
            self._engine.monitor.remove(job)
            self._engine.inbox.remove(job.sequence)
            self._engine.dispatcher.suspects.forget(job.sequence.id)
            if job.sequence.attempts:
                self._engine.tracker.event(job.model, SeqFree(job.sequence.attempt))
            if job.sequence.instance:
                self._leave(job, kind)
        self._unlink()

    def _unlink(self) -> None:
        """Nobody points back here any more: circles would stay until a garbage collection."""
        self._choices.clear()
        for job in self.jobs:
            job.sequence.consumer = Nobody()

    def _leave(self, job: SequenceTask, kind: type[BaseException] | None) -> None:
        sequence = job.sequence
        if not sequence.engine_done:
            self._engine.dispatcher.offers.cancel(sequence)
        now = asyncio.get_running_loop().time()
        finish = sequence.finish or ("cancelled" if kind else "lost")
        first = sequence.first_at
        self._engine.tracker.outcome(
            job.model,
            Outcome(
                request=sequence.attempt,
                instance=sequence.instance,
                time=time.time(),
                cached_tokens=sum(sequence.cached or []),
                output_tokens=len(sequence.tokens),
                ttft_s=None if first is None else first - self._started,
                total_s=now - self._started,
                finish=finish,
            ),
        )
        self._measure(sequence, now)
        self._compare(job)
        for outcome in all_outcomes(job):
            metrics.directives.labels(job.model, outcome).inc()

    def _compare(self, job: SequenceTask) -> None:
        """Compare the cached tokens expected with those found, if the sequence was not moved."""
        sequence, routed = job.sequence, job.routed
        if sequence.attempts != 1 or sequence.cached is None:
            return
        if routed is not None and routed.prefill is None:
            expected = sum(routed.overlap) * self.prepared.model.card.block_size
            self._engine.expectations.note(sequence.instance, expected, sum(sequence.cached))

    def _measure(self, sequence: TokenStream, now: float) -> None:
        meters = self.prepared.model.metrics
        count = len(sequence.tokens)
        if sequence.first_at is None:
            return
        meters.ttft.observe(sequence.first_at - self._started)
        meters.duration.observe(now - self._started)
        if count > 1:
            meters.itl.observe((now - sequence.first_at) / (count - 1))
        meters.cached_tokens.inc(sum(sequence.cached or []))
        meters.output_tokens.inc(count)


def _parser(prepared: PreparedRequest) -> Parser:
    request = prepared.request
    if request.prompts and not request.messages:
        return PlainText()
    must_call = prepared.required_tool_call
    calls = bool(request.tools) and request.tool_choice.mode == "auto"
    grammar = prepared.model.dialect.grammar
    # a whole answer need not begin to tell a call that may never end
    parser = grammar.parser(request.tools, prepared.tail, calls=calls, eager=request.stream)
    return must_call.parser(parser) if must_call is not None else parser


async def _all(coroutines: list[Coroutine[None, None, None]]) -> None:
    """Run them together; on the first error the others are cancelled and it is raised as it is."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
