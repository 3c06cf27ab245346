"""Retention in a real vLLM whose layers alternate between a sliding window and full attention.

The block pool is shared by two groups of layers. Blocks outside of the window are freed while their
request runs.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.random_models import make_sliding_window_model
from support.retention_suite import charged_blocks
from support.vllm import SIZE, VllmRun
from support.wait import eventually

from kvmesh.bus.messages import Clear, Retain
from kvmesh.worker.capabilities import Retaining

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
LENGTH = 10  # blocks of a prompt
HIT = (LENGTH - 1) * SIZE  # vLLM computes the last block of a cached prompt again


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmRun]:
    folder = tmp_path_factory.mktemp("models") / "window"
    make_sliding_window_model(folder, window=2 * SIZE)
    made = await VllmRun.start(
        folder, "max_model_len=1024", "num_gpu_blocks_override=97", "max_num_batched_tokens=128"
    )
    yield made
    await made.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def started(shared: VllmRun) -> VllmRun:
    await asyncio.wait_for(shared.engine.drain(), 60)
    assert (await shared.execute(Clear())).ok
    await eventually(lambda: charged_blocks(shared) == 0)
    shared.sink.deltas.clear()
    return shared


async def flood(started: VllmRun, count: int = 12) -> None:
    for i in range(count):
        await started.run(f"flood {i}", started.prompt(LENGTH, 500 + i), max_tokens=1)


async def test_a_prompt_survives_others_only_with_a_claim(started: VllmRun) -> None:
    for name, retain in (("plain", []), ("kept", [Retain(0, None, 80, explicit=True)])):
        tokens = started.prompt(LENGTH, len(name))
        await started.run(name, tokens, max_tokens=1, retention=retain)
        await flood(started)
        await started.run(f"{name} again", tokens, max_tokens=1)
        assert started.sink.cached(f"{name} again") == (HIT if retain else 0)
        assert (await started.execute(Clear())).ok


async def test_a_prompt_survives_its_own_long_answer(started: VllmRun) -> None:
    """The window leaves the prompt behind: vLLM frees its blocks before the request has ended."""
    tokens = started.prompt(LENGTH, 1)
    kept = [Retain(0, None, 90, explicit=True)]
    await started.run("kept", tokens, max_tokens=200, retention=kept)
    await flood(started)
    await started.run("again", tokens, max_tokens=1)
    assert started.sink.cached("again") == HIT


async def test_claims_beyond_the_budget_are_clipped_and_refuse_nothing(started: VllmRun) -> None:
    names = [f"{i}" for i in range(8)]
    for i, name in enumerate(names):
        kept = [Retain(0, None, 60, explicit=True)]
        await started.run(name, started.prompt(LENGTH, i), max_tokens=1, retention=kept)
    told = [outcome(started, name) for name in names]
    assert told == sorted(told, reverse=True)
    assert set(told) == {"honoured", "clipped"}
    assert charged_blocks(started) == 48  # half of the pool
    await started.run("long", started.prompt(30, 700), max_tokens=1)
    for i, name in enumerate(names):
        await started.run(f"{name} again", started.prompt(LENGTH, i), max_tokens=1)
        if told[i] == "honoured":
            assert started.sink.cached(f"{name} again") == HIT


async def test_released_and_cleared_blocks_are_gone(started: VllmRun) -> None:
    tokens = started.prompt(LENGTH, 3)
    kept = [Retain(0, None, 90, explicit=True)]
    await started.run("kept", tokens, max_tokens=1, retention=kept, session="w")
    assert charged_blocks(started) > 0
    assert isinstance(started.engine, Retaining)
    assert await started.engine.release(["w"]) > 0
    assert charged_blocks(started) == 0
    await started.run("again", tokens, max_tokens=1)
    assert started.sink.cached("again") == 0


def outcome(started: VllmRun, request: str) -> str:
    (told,) = [delta.retention for delta in started.sink.deltas[request] if delta.retention]
    return told[0]
