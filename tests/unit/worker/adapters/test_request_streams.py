"""Output and load of engines that return a stream per request."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from support.engines import prompt, work
from support.recorder import Recorder
from support.wait import eventually

from kvmesh.worker.adapters.request_streams import (
    EngineUnavailable,
    RequestStreams,
    StreamOutput,
)
from kvmesh.worker.engine import Rejected


async def answered(*outputs: StreamOutput) -> AsyncIterator[StreamOutput]:
    for output in outputs:
        yield output


@pytest.mark.parametrize(
    ("cached", "below", "told"),
    [
        (None, [], [0]),
        (48, [], [48]),
        (48, [16, 0, 16], [16, 16, 0, 16]),
        (16, [0, 32], [0, 0, 16]),  # some of what was loaded was computed again
    ],
)
async def test_cached_tokens_come_by_tier_with_the_first_token(
    cached: int | None, below: list[int], told: list[int]
) -> None:
    sink = Recorder()
    streams = RequestStreams(sink, 1, 16)
    first = StreamOutput([7], cached=cached, below=below)
    streams.start(work("r", prompt(64)), answered(first, StreamOutput([8], finish="stop")))
    await streams.drain()
    assert [delta.cached for delta in sink.deltas["r"]] == [told, None]
    assert streams.load("w", 0, 10, 0).cached_tokens == (cached or 0)
    await streams.close()


@pytest.mark.parametrize(("at_end", "told"), [(16, [16]), (None, None)])
async def test_an_estimate_of_cached_tokens_is_corrected_at_the_end(
    at_end: int | None, told: list[int] | None
) -> None:
    sink = Recorder()
    streams = RequestStreams(sink, 1, 16)
    first = StreamOutput([7], cached=48, estimate=True)
    last = StreamOutput([8], finish="stop", cached=at_end)
    streams.start(work("r", prompt(64)), answered(first, last))
    await streams.drain()
    assert [delta.cached for delta in sink.deltas["r"]] == [[48], told]
    load = streams.load("w", 0, 10, 0)
    assert (load.prompt_tokens, load.cached_tokens) == (64, 48 if at_end is None else at_end)
    await streams.close()


async def test_an_aborted_request_counts_with_its_estimate() -> None:
    async def endless() -> AsyncIterator[StreamOutput]:
        yield StreamOutput([7], cached=48, estimate=True)
        await asyncio.Event().wait()

    sink = Recorder()
    streams = RequestStreams(sink, 1, 16)
    streams.start(work("r", prompt(64)), endless())
    await eventually(lambda: sink.tokens("r"))
    assert streams.load("w", 0, 10, 0).cached_tokens == 0
    assert streams.abort("r")
    assert streams.load("w", 0, 10, 0).cached_tokens == 48
    await streams.close()


async def test_computed_tokens_never_go_back() -> None:
    streams, computed = RequestStreams(Recorder(), 1, 16), []
    for name in ("a", "b", "c"):
        streams.start(work(name, prompt(64)), answered(StreamOutput([7], finish="stop", cached=16)))
        computed.append(streams.load("w", 0, 10, 0, busy_s=1.0).computed_tokens)
        await streams.drain()
        computed.append(streams.load("w", 0, 10, 0, busy_s=1.0).computed_tokens)
    assert computed == [0, 48, 48, 96, 96, 144]
    assert streams.load("w", 0, 10, 0).computed_tokens == 144  # without a clock, too
    await streams.close()


async def test_the_batch_is_estimated_from_the_streams() -> None:
    async def begun(tokens: int) -> AsyncIterator[StreamOutput]:
        yield StreamOutput([7] * tokens)
        await asyncio.Event().wait()

    async def silent() -> AsyncIterator[StreamOutput]:
        await asyncio.Event().wait()
        yield StreamOutput([])

    sink = Recorder()
    streams = RequestStreams(sink, 1, 16)
    for name, length, output in (("a", 64, 1), ("b", 100, 5)):
        streams.start(work(name, prompt(length)), begun(output))
    for name, length, priority in (("c", 10, 0), ("d", 20, 0), ("e", 40, 1)):
        streams.start(replace(work(name, prompt(length)), priority=priority), silent())
    await eventually(lambda: sink.tokens("a") and sink.tokens("b"))
    load = streams.load("w", 0, 10, 0, waiting=2, prefill_steps=9)
    assert (load.decoding, load.decode_tokens, load.decode_var) == (2, 64 + 104, 400.0)
    assert (load.waiting, load.waiting_tokens, load.waiting_var) == (2, 10 + 20, 25.0)
    assert (load.prefill_tokens, load.prefill_steps) == (70, 9)
    assert streams.load("w", 0, 10, 0).waiting_tokens == 70, "the engine reports no queue"
    await streams.close()


@pytest.mark.parametrize(
    ("error", "finish"),
    [
        (EngineUnavailable("paused"), "abort"),
        (Rejected("too long"), "error"),
        (RuntimeError("of a newer engine"), "error"),
        (KeyError("token_ids"), "error"),
    ],
)
@pytest.mark.parametrize("tokens", [[], [7]])
async def test_a_stream_that_fails_ends_its_request(
    error: Exception, finish: str, tokens: list[int]
) -> None:
    async def failing() -> AsyncIterator[StreamOutput]:
        if tokens:
            yield StreamOutput(tokens)
        raise error

    sink = Recorder()
    streams = RequestStreams(sink, 1, 16)
    streams.start(work("r", prompt(64)), failing())
    await streams.drain()
    await eventually(lambda: sink.finish("r"), what="the end")
    assert (sink.finish("r"), sink.tokens("r")) == (finish, tokens)
    assert not sink.errors
    await streams.close()
