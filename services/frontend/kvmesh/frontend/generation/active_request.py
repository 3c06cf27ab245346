"""One request from dispatch to its last byte, and the runner that makes them."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvmesh.bus.messages import SeqPrefilled
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import AnswerSummary, Renderer, Usage
from kvmesh.frontend.apis.transcript import Transcript
from kvmesh.frontend.auth.accounts import Account
from kvmesh.frontend.conversation import Block
from kvmesh.frontend.dialects.output import OutputParser, PlainText
from kvmesh.frontend.dispatch.dispatcher import Dispatcher
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.task import DispatchState, SequenceTask
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.generation.cache_expectations import CacheExpectations
from kvmesh.frontend.generation.choice import AnswerContext, Choice, DiscardSink, FrameSink
from kvmesh.frontend.generation.diagnostics import diagnostics
from kvmesh.frontend.generation.nvext import nvext, retained_tokens
from kvmesh.frontend.generation.outcome import OutcomeReporter
from kvmesh.frontend.generation.output import OutputPipeline
from kvmesh.frontend.generation.text_logprobs import TextLogprobs
from kvmesh.frontend.generation.thinking_budget import ThinkingBudget
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest

DISCARD = DiscardSink()
HOUR_S = 3600.0


class UsageCounter:
    """Counts the whole request; each prompt counts once, however many choices it has.

    `diagnose` returns the diagnosis of the cache, if the request asks for it.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        streams: Sequence[TokenStream],
        pipelines: Sequence[OutputPipeline],
        diagnose: Callable[[], dict[str, Any] | None],
    ) -> None:
        self._prepared = prepared
        self._streams = streams
        self._pipelines = pipelines
        self._diagnose = diagnose

    @property
    def output_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self._streams)

    def usage(self) -> Usage:
        prepared = self._prepared
        block_size = prepared.model.card.block_size
        cached = stored = stored_1h = 0
        first_choices = self._streams[:: prepared.request.n]
        for prompt, stream in zip(prepared.prompts, first_choices, strict=True):
            hit = sum(stream.cached or [])
            new = max(prompt.count // block_size * block_size - hit, 0)
            cached += hit
            stored += new
            stored_1h += min(max(retained_tokens(prompt, stream, HOUR_S) - hit, 0), new)
        return Usage(
            prompt=prepared.prompt_tokens,
            cached=cached,
            stored=stored,
            output=self.output_tokens,
            reasoning=sum(pipeline.reasoning_tokens for pipeline in self._pipelines),
            stored_1h=stored_1h,
            diagnostics=self._diagnose(),
        )


class Opening:
    """The frame before the first events of an answer, once."""

    def __init__(self, renderer: Renderer, counter: UsageCounter) -> None:
        self._renderer = renderer
        self._counter = counter
        self._sent = False

    def __call__(self) -> bytes:
        if self._sent:
            return b""
        self._sent = True
        return self._renderer.started(self._counter.usage)


@dataclass(frozen=True)
class RequestRunner:
    """Runs prepared requests; one per frontend."""

    dispatcher: Dispatcher
    events: SequenceEventPublisher
    expectations: CacheExpectations = field(default_factory=CacheExpectations)

    def run(
        self,
        prepared: PreparedRequest,
        renderer: Renderer,
        started: float,
        sink: FrameSink = DISCARD,
        account: Account | None = None,
    ) -> "ActiveRequest":
        """The running request, to be entered. `started` is its arrival on the loop's clock."""
        return ActiveRequest(self, prepared, renderer, started, sink, account)


class _Prompt:
    """Counts a request as waiting until its first token is there, and then as generating.

    Its choices refer to it, and not to the request, which would be a cycle.
    """

    def __init__(self, events: SequenceEventPublisher, prepared: PreparedRequest) -> None:
        self._events = events
        self._model = prepared.model.card.name
        self._metrics = prepared.model.metrics
        self._waits = False

    def begin(self) -> None:
        self._waits = True
        self._metrics.waiting.inc()

    def computed(self, stream: TokenStream) -> None:
        """The prompt of an attempt is computed: its first tokens are there."""
        self._events.event(self._model, SeqPrefilled(stream.attempt))
        if self._waits:
            self._waits = False
            self._metrics.waiting.dec()
            self._metrics.generating.inc()

    def end(self) -> None:
        (self._metrics.waiting if self._waits else self._metrics.generating).dec()


class ActiveRequest:
    """A running request: `async with` it, await `accepted` (optional) and `finished`.

    Frames go to the sink as tokens arrive, without a task per token. Leaving the context frees
    everything that still runs.
    """

    def __init__(
        self,
        runner: RequestRunner,
        prepared: PreparedRequest,
        renderer: Renderer,
        started: float,
        sink: FrameSink,
        account: Account | None,
    ) -> None:
        self._runner = runner
        self._account = account
        self._sink = sink
        self.started = started
        self._dispatching: asyncio.Future[None] | None = None
        self._is_dispatched = False
        self._summary: AnswerSummary | None = None
        self._prompt = _Prompt(runner.events, prepared)
        self.prepared = prepared
        request = prepared.request
        count = len(prepared.prompts) * request.n
        names = [f"{request.id}-{i}" if i else request.id for i in range(count)]
        prompts = [prompt.count for prompt in prepared.prompts for _ in range(request.n)]
        streams = [
            TokenStream(name, started, limit=prepared.max_tokens, prompt_tokens=count)
            for name, count in zip(names, prompts, strict=True)
        ]
        logprobs = [_logprobs(prepared) for _ in streams]
        self._pipelines = [_pipeline(prepared, parser) for parser in logprobs]
        states = [DispatchState(started + runner.dispatcher.route_timeout_s) for _ in streams]
        diagnose = partial(diagnostics, prepared, streams[0], states[0])
        self._counter = UsageCounter(prepared, streams, self._pipelines, diagnose)
        # agents' answers are read along, which costs less than reading them again
        followed = prepared.speculates or (prepared.keeps_answer and bool(request.tools))
        self.transcript = Transcript() if followed and count == 1 else None
        answer = AnswerContext(
            renderer,
            sink,
            self._prompt.computed,
            Opening(renderer, self._counter),
            self.transcript,
        )
        self._choices = [
            Choice(
                index, stream, self._pipelines[index], answer, logprobs[index], _budget(prepared)
            )
            for index, stream in enumerate(streams)
        ]
        self.tasks = [
            SequenceTask(
                prepared,
                prepared.prompts[index // request.n],
                index,
                stream,
                self._choices[index].flush,
                states[index],
            )
            for index, stream in enumerate(streams)
        ]

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first choice so far."""
        return self.tasks[0].stream.tokens

    @property
    def rendered(self) -> int:
        """Those of them that are rendered."""
        return self._choices[0].rendered

    def replay(self, tokens: list[int], cuts: list[int]) -> None:
        """Render what another frontend had generated, in the same steps, before the dispatch.

        The sequence gets another name: the attempts of that frontend may still be running.
        """
        choice, old = self._choices[0], self.tasks[0].stream
        old.resume_as(f"{old.id}-r{secrets.token_hex(4)}")
        for cut in dict.fromkeys([*cuts, len(tokens)]):
            old.tokens += tokens[len(old.tokens) : cut]
            old.inherited = cut
            choice.flush()
        if self.prepared.request.sampling.logprobs is not None:
            old.logprobs = [{} for _ in tokens]  # they are in the records; those of others follow

    async def accepted(self, timeout: float | None) -> None:
        """Return when workers have accepted every sequence, or after `timeout` seconds if given.

        Raises ApiError if no worker accepts one.
        """
        self._dispatching = asyncio.ensure_future(self._dispatch())
        await asyncio.wait([self._dispatching], timeout=timeout)
        if self._dispatching.done():
            await self._dispatched()

    async def finished(self) -> bytes:
        """Return the last frames when every sequence has ended. Raises the first error."""
        await self._dispatched()
        self.flush()
        if len(self.tasks) == 1:
            await self._runner.dispatcher.follow(self.tasks[0])
            return self._choices[0].finish()
        last: list[bytes] = []
        await run_together([self._follow(task, last) for task in self.tasks])
        return b"".join(last)

    def flush(self) -> None:
        """Render the tokens that arrived while the sink was not writable."""
        for task in self.tasks:
            if not task.stream.ended.is_set():
                task.consumer()

    def summary(self) -> AnswerSummary:
        """Usage and the requested `nvext` fields; final once the request has finished."""
        self._summary = self.so_far()
        return self._summary

    def so_far(self) -> AnswerSummary:
        """The summary of what there is of the answer."""
        facts = None
        if self.prepared.request.extra_fields:
            found = (p.stopped_by for p in self._pipelines if p.stopped_by is not None)
            facts = nvext(self.tasks, self.started, next(found, None))
        return AnswerSummary(self._counter.usage(), facts)

    def answer(self) -> list[Block]:
        """The blocks of the answer, in the order of generation, if it has calls or thinking.

        Empty for other answers, for several, and for one that was not rendered to its end.
        """
        stream, pipeline, choice = self.tasks[0].stream, self._pipelines[0], self._choices[0]
        whole = stream.finish == "stop" or (stream.finish == "length" and not choice.calls)
        if len(self.tasks) > 1 or not whole or not choice.finished:
            return []
        if not (choice.calls or pipeline.reasoning_tokens):
            return []
        transcript = self.transcript
        if transcript is None:
            again, transcript = _pipeline(self.prepared), Transcript()
            for event in again.feed(stream.tokens) + again.finish():
                transcript.add(event)
        return transcript.blocks(in_order=True)

    @property
    def is_cut(self) -> bool:
        """True if the model has generated more, or less, than the answer shows."""
        return self._pipelines[0].complete

    def usage(self) -> Usage:
        """The tokens so far, or those of the summary."""
        return self._summary.usage if self._summary is not None else self._counter.usage()

    def charge(self, tokens: int) -> None:
        """Count tokens computed for the request against the limits of its API key."""
        if self._account is not None:
            self._account.charge_tokens(tokens)

    def _dispatch(self) -> Coroutine[Any, Any, None]:
        return run_together([self._runner.dispatcher.dispatch(task) for task in self.tasks])

    async def _follow(self, task: SequenceTask, last: list[bytes]) -> None:
        await self._runner.dispatcher.follow(task)
        frame = self._choices[task.index].finish()
        if self._sink.writable:
            self._sink.write(frame)  # the other choices may take long
        else:
            last.append(frame)

    async def _dispatched(self) -> None:
        """Return when workers have accepted every sequence; forgets the task that offered them."""
        if not self._is_dispatched:
            await (self._dispatching or self._dispatch())
            self._is_dispatched, self._dispatching = True, None

    async def __aenter__(self) -> "ActiveRequest":
        metrics.active.inc()
        self._prompt.begin()
        self.charge(self.prepared.prompt_tokens)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._dispatching is not None:
            self._dispatching.cancel()
            self._dispatching = None
        metrics.active.dec()
        self._prompt.end()
        self.charge(self._counter.output_tokens)
        if kind is not None and issubclass(kind, asyncio.CancelledError | ConnectionError):
            metrics.cancellations.labels(self.prepared.model.card.name).inc()
        tenant = self._account.key.tenant if self._account is not None else None
        reporter = OutcomeReporter(self._runner.events, self._runner.expectations)
        for task in self.tasks:
            self._runner.dispatcher.release(task)
            if task.stream.instance:
                calls = self._choices[task.index].calls
                reporter.report(task, self.started, calls, tenant)


def _pipeline(prepared: PreparedRequest, parser: OutputParser | None = None) -> OutputPipeline:
    request, sampling = prepared.request, prepared.request.sampling
    return OutputPipeline(
        prepared.model.dialect.detokenizers.create(),
        sampling.stop,
        parser or _parser(prepared),
        one_call=not request.parallel_tool_calls,
        min_tokens=sampling.min_tokens,
    )


def _logprobs(prepared: PreparedRequest) -> TextLogprobs | None:
    count = prepared.request.sampling.logprobs
    if count is None:
        return None
    # text completions list the chosen token beside the most likely ones
    most = count if prepared.request.messages else count + 1
    texts, by_id = prepared.model.dialect.token_texts, prepared.request.token_names
    return TextLogprobs(_parser(prepared), texts, most, by_id)


def _budget(prepared: PreparedRequest) -> ThinkingBudget | None:
    """The bound of the thinking, if there is one and the model's thinking can be ended."""
    limit, form = prepared.request.thinking_budget, prepared.form
    end = form.grammar.end_of_thinking(form.prompt, constrained=prepared.guided is not None)
    if limit is None or not prepared.request.messages or not end:
        return None
    tokens = prepared.model.dialect.tokenizer.encode(end, add_special_tokens=False).ids
    return ThinkingBudget(limit, tokens, form.begins_thinking)


def _parser(prepared: PreparedRequest) -> OutputParser:
    request = prepared.request
    if request.prompts and not request.messages:
        return PlainText()
    # without streaming, a call that breaks off is text: emit no call before its end
    return prepared.form.parser(eager=request.stream)


def run_together(coroutines: list[Coroutine[Any, Any, None]]) -> Coroutine[Any, Any, None]:
    """Run them together; on the first error cancel the others and raise it unwrapped."""
    return coroutines[0] if len(coroutines) == 1 else _together(coroutines)


async def _together(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
