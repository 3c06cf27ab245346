"""Retention in the prefix cache of a real vLLM: the contract of every engine with `Retaining`."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.engines import StartedEngine
from support.retention_suite import RetentionSuite, charged_blocks, emptied, fill_engine
from support.vllm import SIZE, VllmRun
from support.wait import eventually

from kvmesh.bus.messages import Clear, Retain

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model: Path) -> AsyncIterator[VllmRun]:
    """A vLLM of 64 blocks beside the one that it keeps as a placeholder."""
    made = await VllmRun.start(
        tiny_model,
        "max_model_len=1024",
        "num_gpu_blocks_override=65",
        f"long_prefill_token_threshold={2 * SIZE}",
    )
    yield made
    await made.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def started(shared: VllmRun) -> StartedEngine:
    return await emptied(shared)


class TestVllmRetention(RetentionSuite):
    """The suite of all engines, on vLLM."""


async def test_a_reset_of_the_cache_ends_all_claims(started: StartedEngine) -> None:
    """vLLM refuses a reset if a block is neither used nor free, so a second one must succeed."""
    for name in ("a", "b"):
        kept = [Retain(0, None, 90, explicit=True)]
        await started.run(name, started.prompt(10), max_tokens=1, retention=kept)
        assert charged_blocks(started) == 10
        engine: Any = started.engine
        assert await engine._llm.reset_prefix_cache()  # vLLM's own, not that of `Clear`
        await started.run(f"{name} again", started.prompt(3, 9), max_tokens=1)
        assert started.sink.cached(f"{name} again") == 0
        await eventually(lambda: charged_blocks(started) == 0)
        assert (await started.execute(Clear())).blocks == 3


async def test_equal_prompts_at_once_are_claimed_once(started: StartedEngine) -> None:
    """Beside a third, vLLM prefills 2 blocks of each a step, and so computes most of them twice."""
    started.submit("third", started.prompt(1, 9), max_tokens=500)
    await started.wait_for_tokens("third")
    tokens = started.prompt(20)
    kept = [Retain(0, None, 90, explicit=True)]
    for name in ("one", "two"):
        started.submit(name, tokens, max_tokens=1, retention=kept)
    await started.ended("one", "two")
    assert started.engine.abort("third")
    assert started.sink.cached("two") < 18 * SIZE
    await eventually(lambda: charged_blocks(started) == 20)
    await fill_engine(started)
    await started.run("again", tokens, max_tokens=1)
    assert started.sink.cached("again") == 19 * SIZE
    assert charged_blocks(started) == 20
    assert (await started.execute(Clear())).ok
    await eventually(lambda: charged_blocks(started) == 0)
