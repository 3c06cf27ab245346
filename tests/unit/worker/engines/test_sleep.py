"""Sleep and wake of the engines that run anywhere."""

import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.engines import StartedEngine, prompt, running
from support.recorder import Recorder

from kvmesh.worker.capabilities import Sleeping, sleep_problem


@pytest_asyncio.fixture(params=["mock", "mock with tiers", "torch"])
async def started(request: pytest.FixtureRequest) -> AsyncIterator[StartedEngine]:
    async with running(request.param) as engine:
        yield engine


async def test_it_answers_as_before_with_an_empty_cache(started: StartedEngine) -> None:
    engine = started.engine
    assert isinstance(engine, Sleeping)
    assert sleep_problem(engine, "it") == ""
    await started.run("a", prompt(100))
    before, seen = started.sink.tokens("a"), len(started.sink.order)
    for name in ("b", "c"):
        await engine.drain()
        await engine.sleep()
        old, started.sink = started.sink, Recorder()
        assert await engine.start(started.sink) == started.info
        await started.run(name, prompt(100))
        assert started.sink.tokens(name) == before
        assert started.sink.cached(name) == 0
        assert started.held_hashes >= set(started.sequence(prompt(100)))
        assert len(old.order) == seen, "the earlier sink hears nothing any more"
        seen = 1


async def test_a_sleeping_engine_closes(started: StartedEngine) -> None:
    engine: Any = started.engine
    await engine.sleep()


async def test_a_sleeping_torch_engine_holds_no_weights_and_no_kv() -> None:
    pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
    async with running("torch") as started:
        engine: Any = started.engine
        await started.run("a", prompt(100))
        model = engine._core.model
        held = [weakref.ref(model), weakref.ref(model.pool)]
        held += [weakref.ref(each) for each in model.module.parameters()]
        del model
        await engine.sleep()
        assert [ref() for ref in held if ref() is not None] == []


async def test_an_engine_without_sleep_says_so() -> None:
    engine: Any = object()
    assert sleep_problem(engine, "openai") == "unsupported: the openai engine cannot sleep"
