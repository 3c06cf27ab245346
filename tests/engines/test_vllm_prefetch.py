"""Prefetches of the real vLLM: the suite of all engines, and prefetches beside requests."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.prefetch_suite import PrefetchSuite, prefetch_of
from support.vllm import VllmRun, prompt, sequence
from support.wait import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model: Path) -> AsyncIterator[VllmRun]:
    made = await VllmRun.start(tiny_model)
    yield made
    await made.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def started(shared: VllmRun) -> VllmRun:
    """The shared engine with an empty cache and a fresh record."""
    await asyncio.wait_for(shared.engine.drain(), 60)
    await shared.wait_for_events()
    shared.engine.clear()
    await eventually(lambda: not shared.held_hashes, what="the cache is empty")
    shared.sink.deltas.clear()
    shared.sink.order.clear()
    return shared


class TestVllmPrefetch(PrefetchSuite):
    """The suite of all engines that prefetch, on vLLM."""


async def test_a_prefetch_computes_beside_a_running_request(started: VllmRun) -> None:
    alone = started.prompt(2, first=9)
    await started.run("before", alone, max_tokens=300)
    started.submit("beside", alone, max_tokens=300)
    await started.wait_for_tokens("beside")
    tokens = started.prompt(12)
    assert (await started.execute(prefetch_of(started, tokens, compute=12 * started.size))).ok
    await eventually(lambda: sequence(tokens)[0] in started.held_hashes, what="a first slice")
    assert not started.sink.finish("beside")
    await started.ended("beside")
    assert started.sink.tokens("beside") == started.sink.tokens("before")
    held = set(sequence(tokens))
    await eventually(lambda: held <= started.held_hashes, what="the whole prompt")
    assert not started.sink.tokens("p")


async def test_what_a_prefetch_computed_before_its_request_is_cached(started: VllmRun) -> None:
    tokens, requests = started.prompt(15), started.load().requests
    assert (await started.execute(prefetch_of(started, tokens, compute=15 * started.size))).ok
    await eventually(lambda: len(started.held_hashes) >= 3, what="some slices")
    held = started.depth(tokens)
    await started.run("a", tokens, max_tokens=1)
    assert started.sink.cached("a") >= held
    assert started.load().requests == requests + 1, "slices are not counted"
    assert not started.engine.abort("p"), "the request is here"


async def test_no_slice_starts_while_a_request_waits_for_its_first_token(started: VllmRun) -> None:
    """Four requests fill the engine; the fifth waits, and so does the prefetch."""
    for number in range(4):
        started.submit(f"r{number}", started.prompt(1, first=number), max_tokens=400)
    for number in range(4):
        await started.wait_for_tokens(f"r{number}")
    started.submit("waits", started.prompt(1, first=77), max_tokens=1)
    tokens = started.prompt(4, first=99)
    assert (await started.execute(prefetch_of(started, tokens, compute=4 * started.size))).ok
    await eventually(lambda: len(started.sink.tokens("r0")) >= 200, what="half of an answer")
    assert sequence(tokens)[0] not in started.held_hashes
    await started.ended("waits", "r0", "r1", "r2", "r3")
    await eventually(lambda: sequence(tokens)[3] in started.held_hashes, what="the prefetch")


async def test_an_ended_prefetch_leaves_nothing_running(started: VllmRun) -> None:
    for number in range(20):
        command = prefetch_of(started, prompt(480, first=number), compute=480, deadline_s=5.0)
        assert (await started.execute(command)).ok
        await asyncio.sleep(0)
        assert started.engine.abort("p")
    before = time.monotonic()
    await started.run("a", started.prompt(1), max_tokens=1)
    assert time.monotonic() - before < 30
    await started.wait_for_events()
    await eventually(lambda: not started.load().active_blocks, what="no block is in use")
