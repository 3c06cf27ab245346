"""Requests of an engine that returns a stream per request, as servers do.

One task follows each stream. Output received in one iteration of the event loop is delivered
together, which is one engine step: such engines emit the tokens of a step at once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Load, Sampling, Work
from kvmesh.worker.constraints.structural_tags import allows_free_text
from kvmesh.worker.engine import EngineError, OutputDelta, Rejected, Sink
from kvmesh.worker.enginecore.counters import variance

log = logging.getLogger(__name__)


class StreamOutput(Struct):
    """Output from a stream; `cached` is the prompt tokens not computed, if the engine reports them.

    It comes with the first tokens; if that is an `estimate`, the last output may correct it.

    `below` has how many of those came from each tier below the engine. `handoff` comes with the end
    of a prefill whose KV another engine is to fetch. `retention` and `decode` are outcomes of
    directives, as in `OutputDelta`. `continues`: the caller gets `finish` now, while the engine
    works on until the stream ends. `admitted_at` is the time, on the monotonic clock, at which the
    engine's scheduler started the request, if known. `vectors` are as in `OutputDelta`.
    """

    tokens: list[int]
    finish: str | None = None
    cached: int | None = None
    logprobs: list[dict[int, float]] | None = None
    handoff: dict[str, Any] | None = None
    below: list[int] = []
    retention: list[str] | None = None
    decode: str | None = None
    continues: bool = False
    estimate: bool = False
    admitted_at: float | None = None
    vectors: list[bytes] | None = None


class EngineUnavailable(Exception):
    """The engine cannot run this request now; another worker may."""


@dataclass
class StreamCounters:
    """Totals of one rank since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    aborted: int = 0


@dataclass
class _StreamRequest:
    work: Work
    prompt_tokens: int
    task: asyncio.Task[None] | None = None
    generated: int = 0
    started: bool = False
    cached: int = 0
    counted: bool = False  # its prompt and cached tokens, which the counters cannot take back
    delivered: bool = False  # the caller has had the last delta


class RequestStreams:
    """Follows streams, delivers their output to the sink, and counts for the worker's load.

    `count_steps` is for engines that do not report their steps: each output counts as a step.
    """

    def __init__(self, sink: Sink, ranks: int, block_size: int, count_steps: bool = False) -> None:
        self._sink = sink
        self._block_size = block_size
        self._count_steps = count_steps
        self._requests: dict[str, _StreamRequest] = {}
        self._pending: list[OutputDelta] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.counters = [StreamCounters() for _ in range(ranks)]

    def is_live(self, request: str) -> bool:
        """True if a request has this id."""
        return request in self._requests

    def start(self, work: Work, stream: AsyncIterator[StreamOutput]) -> None:
        """Follow `stream` until it ends; the request ends with it."""
        request = _StreamRequest(work, len(work.tokens) // 4)
        self._requests[work.request] = request
        self._idle.clear()
        request.task = asyncio.create_task(
            self._follow(request, stream), name=f"stream {work.request}"
        )

    def abort(self, request: str) -> bool:
        """Stop a request by closing its stream; False if it is unknown."""
        live = self._requests.get(request)
        if live is None:
            return False
        self.counters[live.work.rank].aborted += 1
        if not live.delivered:
            self._emit([OutputDelta(request, [], finish="abort")])
        self._end(live)
        if live.task is not None:
            live.task.cancel()
        return True

    def fail(self, error: EngineError) -> None:
        """Report once that the engine is dead."""
        if not self._closed:
            self._closed = True
            self._flush()
            self._sink.failed(error)

    async def drain(self) -> None:
        await self._idle.wait()
        while self._closing:
            await asyncio.wait(self._closing)

    async def close(self) -> None:
        self._closed = True
        for live in list(self._requests.values()):
            if live.task is not None:
                live.task.cancel()
                self._closing.add(live.task)
        if self._closing:
            await asyncio.wait(self._closing)

    def load(
        self,
        instance: str,
        rank: int,
        total_blocks: int,
        cached_blocks: int,
        waiting: int | None = None,
        active_blocks: int | None = None,
        preemptions: int = 0,
        step_s: float = 0.0,
        busy_s: float = 0.0,
        prefill_steps: int = 0,
        load_ratio: float = 0.0,
    ) -> Load:
        """The load of a rank; values that the engine reports replace estimates from the streams."""
        requests = [request for request in self._requests.values() if request.work.rank == rank]
        new = [request for request in requests if not request.started]
        waiting_count = min(len(requests), len(new) if waiting is None else waiting)
        if active_blocks is None:
            held = (
                request.prompt_tokens + request.generated for request in requests if request.started
            )
            active_blocks = sum(-(-tokens // self._block_size) for tokens in held)
        counters = self.counters[rank]
        # the last token's KV is computed with the next one
        decoding = [r.prompt_tokens + r.generated - 1 for r in requests if r.started]
        queue = sorted(new, key=lambda request: request.work.priority, reverse=True)
        queued = [request.prompt_tokens for request in queue[max(0, len(new) - waiting_count) :]]
        return Load(
            instance=instance,
            rank=rank,
            running=len(requests) - waiting_count,
            waiting=waiting_count,
            active_blocks=active_blocks if requests else 0,
            cached_blocks=cached_blocks,
            total_blocks=total_blocks,
            prefill_tokens=sum(request.prompt_tokens for request in new),
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            requests=counters.requests,
            aborted=counters.aborted,
            preemptions=preemptions,
            step_s=step_s if requests else 0.0,
            busy_s=busy_s,
            computed_tokens=counters.prompt_tokens - counters.cached_tokens,
            decoding=len(decoding),
            decode_tokens=sum(decoding),
            decode_var=_variance(decoding),
            waiting_tokens=sum(queued),
            waiting_var=_variance(queued),
            prefill_steps=prefill_steps,
            load_ratio=load_ratio,
        )

    async def _follow(self, request: _StreamRequest, stream: AsyncIterator[StreamOutput]) -> None:
        try:
            async for output in stream:
                self._add_output(request, output)
            self._finish(request, "error", "the engine ended the stream without a finish reason")
        except EngineUnavailable as error:
            self._finish(request, "abort", str(error))
        except Rejected as error:
            self._finish(request, "error", error.reason, error.invalid)
        except EngineError as error:
            self.fail(error)
        except (
            Exception
        ) as error:  # of the engine's own types: without an end the caller would wait
            log.exception("the stream of request %s failed", request.work.request)
            self._finish(request, "error", f"the engine failed: {error!r}")

    def _add_output(self, request: _StreamRequest, output: StreamOutput) -> None:
        if self._requests.get(request.work.request) is not request:
            return
        counters = self.counters[request.work.rank]
        counters.output_tokens += len(output.tokens)
        counters.steps += self._count_steps
        request.generated += len(output.tokens)
        delta = OutputDelta(
            request.work.request,
            output.tokens,
            output.finish,
            logprobs=output.logprobs,
            handoff=output.handoff,
            decode=output.decode,
            vectors=output.vectors,
        )
        if output.continues:
            self._emit([delta])
            request.delivered = True
            return
        if not request.started and (output.tokens or output.finish):
            request.started = True
            request.cached = output.cached or 0
            delta.cached = _by_tier(request.cached, output.below)
            delta.retention = output.retention
            delta.admitted_at = output.admitted_at
            if not output.estimate:
                self._count_prompt(request)
        elif output.finish and output.cached is not None and not request.counted:
            request.cached = output.cached
            delta.cached = _by_tier(request.cached, output.below)
        if not request.delivered:
            self._emit([delta])
        if output.finish is not None:
            counters.requests += 1
            self._end(request)

    def _finish(
        self, request: _StreamRequest, finish: str, error: str, invalid: bool = False
    ) -> None:
        name = request.work.request
        if self._requests.get(name) is not request:
            return
        if request.delivered:
            log.warning("request %s failed after its handoff: %s", name, error)
        else:
            self._emit([OutputDelta(name, [], finish=finish, error=error, invalid=invalid)])
        self._end(request)

    def _count_prompt(self, request: _StreamRequest) -> None:
        counters, request.counted = self.counters[request.work.rank], True
        counters.prompt_tokens += request.prompt_tokens
        counters.cached_tokens += request.cached

    def _end(self, request: _StreamRequest) -> None:
        if request.started and not request.counted:
            self._count_prompt(request)
        del self._requests[request.work.request]
        if request.task is not None:
            self._closing.add(request.task)
            request.task.add_done_callback(self._closing.discard)
        if not self._requests:
            self._idle.set()

    def _emit(self, deltas: list[OutputDelta]) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending += deltas
        if any(delta.finish == "abort" for delta in deltas):
            self._flush()

    def _flush(self) -> None:
        if self._pending and not self._closed:
            deltas, self._pending = self._pending, []
            self._sink.output(deltas)


def _variance(lengths: list[int]) -> float:
    return variance(len(lengths), sum(lengths), sum(length * length for length in lengths))


def _by_tier(cached: int, below: list[int]) -> list[int]:
    """Cached tokens by tier; tokens loaded from below may have been computed after all."""
    tiers = []
    for tokens in below:
        tiers.append(min(tokens, cached))
        cached -= tiers[-1]
    return [cached, *tiers]


class StepClock:
    """Counts steps by an engine's own counter, or one per update without it."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.steps = 0

    def update(self, counter: float | None) -> int:
        """Record the engine's counter, if it has one; return the steps so far."""
        if counter is None or self._last is None:
            self.steps += 1
        else:
            self.steps += max(0, int(counter - self._last))
        self._last = counter
        return self.steps


def remaining(work: Work) -> Sampling:
    """Sampling parameters for the rest of an output that another worker has begun."""
    sampling, guided = work.sampling, work.sampling.guided
    if work.generated and guided is not None:
        if not allows_free_text(guided):
            raise Rejected("this engine cannot continue a constrained answer after a migration")
        # tags may begin anywhere: the rest of the output is generated without the constraint
        guided = None
    return replace(
        sampling,
        guided=guided,
        max_tokens=sampling.max_tokens - work.generated,
        min_tokens=max(0, sampling.min_tokens - work.generated),
    )
