"""Prefetches of the real vLLM: the suite of all engines, and prefetches beside requests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.prefetch_suite import SlicedPrefetchSuite, prefetch_of
from support.vllm import VllmRun, sequence
from support.wait import eventually

from kvmesh.bus.messages import Clear

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model: Path) -> AsyncIterator[VllmRun]:
    made = await VllmRun.start(tiny_model, "max_model_len=1024")
    yield made
    await made.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def started(shared: VllmRun) -> VllmRun:
    """The shared engine with an empty cache and a fresh record."""
    await asyncio.wait_for(shared.engine.drain(), 60)
    await shared.wait_for_events()
    await shared.engine.clear(Clear())
    await eventually(lambda: not shared.held_hashes, what="the cache is empty")
    shared.sink.deltas.clear()
    shared.sink.order.clear()
    return shared


class TestVllmPrefetch(SlicedPrefetchSuite):
    """The suite of all engines that prefetch, on vLLM."""


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
