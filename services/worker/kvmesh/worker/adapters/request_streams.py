"""The requests of an engine that answers each with a stream of its own, as servers do.

One task follows each stream. What they get in one turn of the event loop is told together, which
is one engine step, since such engines hand out the tokens of a step at once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Load, Sampling, Work
from kvmesh.worker.engine import EngineError, OutputDelta, Rejected, Sink

log = logging.getLogger(__name__)


class StreamOutput(Struct):
    """A piece of a stream. `cached` is prompt tokens not computed, where the engine says so.

    Of those, `below` came from tiers below the engine, one number each. `handoff` comes with the
    end of a prefill whose KV another engine is to fetch.
    """

    tokens: list[int]
    finish: str | None = None
    cached: int | None = None
    logprobs: list[dict[int, float]] | None = None
    handoff: dict[str, Any] | None = None
    below: list[int] = []


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
class _Live:
    work: Work
    prompt_tokens: int
    task: asyncio.Task[None] | None = None
    generated: int = 0
    started: bool = False


class RequestStreams:
    """Follows streams and tells the sink; keeps the counts that a worker's load needs.

    `count_steps` is for engines that do not say how many steps they take: pieces count as steps.
    """

    def __init__(self, sink: Sink, ranks: int, block_size: int, count_steps: bool = False) -> None:
        self._sink = sink
        self._block_size = block_size
        self._count_steps = count_steps
        self._requests: dict[str, _Live] = {}
        self._pending: list[OutputDelta] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.counters = [StreamCounters() for _ in range(ranks)]

    def start(self, work: Work, stream: AsyncIterator[StreamOutput]) -> None:
        """Follow `stream` to its end, which is the end of the request."""
        live = _Live(work, len(work.tokens) // 4)
        self._requests[work.request] = live
        self._idle.clear()
        live.task = asyncio.create_task(self._follow(live, stream), name=f"stream {work.request}")

    def abort(self, request: str) -> bool:
        """Stop following; closing the stream stops the engine. False if it is not here."""
        live = self._requests.get(request)
        if live is None:
            return False
        self.counters[live.work.rank].aborted += 1
        self._emit([OutputDelta(request, [], finish="abort")])
        self._end(live)
        if live.task is not None:
            live.task.cancel()
        return True

    def fail(self, error: EngineError) -> None:
        """The engine is dead: tell it once."""
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
    ) -> Load:
        """A rank's load; what the engine itself says about it goes before what is seen here."""
        mine = [live for live in self._requests.values() if live.work.rank == rank]
        new = [live for live in mine if not live.started]
        waits = min(len(mine), len(new) if waiting is None else waiting)
        if active_blocks is None:
            held = (live.prompt_tokens + live.generated for live in mine if live.started)
            active_blocks = sum(-(-tokens // self._block_size) for tokens in held)
        counters = self.counters[rank]
        return Load(
            instance=instance,
            rank=rank,
            running=len(mine) - waits,
            waiting=waits,
            active_blocks=active_blocks if mine else 0,
            cached_blocks=cached_blocks,
            total_blocks=total_blocks,
            prefill_tokens=sum(live.prompt_tokens for live in new),
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            requests=counters.requests,
            aborted=counters.aborted,
            preemptions=preemptions,
            step_s=step_s if mine else 0.0,
            busy_s=busy_s,
            computed_tokens=counters.prompt_tokens - counters.cached_tokens,
        )

    async def _follow(self, live: _Live, stream: AsyncIterator[StreamOutput]) -> None:
        name = live.work.request
        try:
            async for output in stream:
                self._add_output(live, output)
            if name in self._requests:
                self._finish(live, "error", "the engine ended the answer without a reason")
        except EngineUnavailable as error:
            self._finish(live, "abort", str(error))
        except Rejected as error:
            self._finish(live, "error", error.reason, invalid=True)
        except EngineError as error:
            self.fail(error)

    def _add_output(self, live: _Live, output: StreamOutput) -> None:
        if self._requests.get(live.work.request) is not live:
            return
        counters = self.counters[live.work.rank]
        counters.output_tokens += len(output.tokens)
        counters.steps += self._count_steps
        live.generated += len(output.tokens)
        delta = OutputDelta(
            live.work.request,
            output.tokens,
            output.finish,
            logprobs=output.logprobs,
            handoff=output.handoff,
        )
        if not live.started and (output.tokens or output.finish):
            live.started = True
            cached = output.cached or 0
            delta.cached = _by_tier(cached, output.below)
            counters.prompt_tokens += live.prompt_tokens
            counters.cached_tokens += cached
        self._emit([delta])
        if output.finish is not None:
            counters.requests += 1
            self._end(live)

    def _finish(self, live: _Live, finish: str, error: str, invalid: bool = False) -> None:
        if self._requests.get(live.work.request) is live:
            last = OutputDelta(live.work.request, [], finish=finish, error=error, invalid=invalid)
            self._emit([last])
            self._end(live)

    def _end(self, live: _Live) -> None:
        del self._requests[live.work.request]
        if live.task is not None:
            self._closing.add(live.task)
            live.task.add_done_callback(self._closing.discard)
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
            told, self._pending = self._pending, []
            self._sink.output(told)


def _by_tier(cached: int, below: list[int]) -> list[int]:
    """Cached tokens by tier; what came from below may have had to be computed after all."""
    tiers = []
    for tokens in below:
        tiers.append(min(tokens, cached))
        cached -= tiers[-1]
    return [cached, *tiers]


class StepClock:
    """Steps as an engine's counter tells them, or one for each look at which it was well."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.steps = 0

    def update(self, counter: float | None) -> int:
        """Enter what the engine's counter says, if it has one; returns the steps so far."""
        if counter is None or self._last is None:
            self.steps += 1
        else:
            self.steps += max(0, int(counter - self._last))
        self._last = counter
        return self.steps


def remaining(work: Work) -> Sampling:
    """What is left to generate of an answer that another worker has begun."""
    sampling, guided = work.sampling, work.sampling.guided
    if work.generated and guided is not None:
        if guided.kind != "structural_tag":
            raise Rejected("this engine cannot continue a constrained answer in its middle")
        # tags begin where the model likes: the answer goes on without, its calls less sure
        guided = None
    return replace(
        sampling,
        guided=guided,
        max_tokens=sampling.max_tokens - work.generated,
        min_tokens=max(0, sampling.min_tokens - work.generated),
    )
