"""Contract of the engines that run anywhere, and abilities of the mock alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.engine_suite import EngineSuite
from support.engines import (
    ENGINES,
    StartedEngine,
    prompt,
    running,
    sequence,
    start_mock,
)
from support.prefetch_suite import PrefetchSuite
from support.wait import eventually

from kvmesh.bus.messages import Clear, Retain
from kvmesh.demo import model_dir
from kvmesh.worker.capabilities import Retaining
from kvmesh.worker.clearing import ClearOutcome
from kvmesh.worker.engine import EngineError


@pytest_asyncio.fixture(params=ENGINES)
async def started(request: pytest.FixtureRequest) -> AsyncIterator[StartedEngine]:
    async with running(request.param) as engine:
        yield engine


class TestEveryEngine(EngineSuite):
    """Engines that need an environment of their own are in tests/engines."""


class TestPrefetch(PrefetchSuite):
    """The suite of all engines that prefetch."""


async def test_clear_drops_unused_blocks_only(started: StartedEngine) -> None:
    started.submit("a", prompt(100), max_tokens=1)
    await started.ended("a")
    started.submit("b", prompt(50, first=5), max_tokens=200)
    await eventually(lambda: started.sink.tokens("b"))
    outcome = await started.engine.clear(Clear())
    assert outcome.blocks == 6
    assert outcome.kept[0].startswith("requests or copies use")
    assert not started.sink.held[0] & set(sequence(prompt(100)))
    assert set(sequence(prompt(50, first=5))) <= started.sink.held[0]
    started.engine.abort("b")


async def test_a_tenant_clears_its_own_alone_even_if_salts_collide(started: StartedEngine) -> None:
    tokens, size = prompt(64), started.size
    await started.run("a", tokens, max_tokens=1, tenant="a" * 32)
    for other in ("b" * 32, ""):
        outcome = await started.engine.clear(Clear(salt=started.salt, tenant=other))
        assert outcome == ClearOutcome()
    await started.run("again", tokens, max_tokens=1, tenant="a" * 32)
    assert started.sink.cached("again") == 3 * size
    outcome = await started.engine.clear(Clear(salt=started.salt, tenant="a" * 32))
    assert outcome == ClearOutcome(4)


async def test_the_parts_of_a_tenant_share_its_budget(started: StartedEngine) -> None:
    assert isinstance(started.engine, Retaining)
    kept = [Retain(0, None, 90, 60.0, explicit=True)]
    for number in range(4):
        tokens = prompt(11 * 16, first=100 * number)
        tenant = f"greedy/{number}"
        await started.run(f"r{number}", tokens, max_tokens=1, tenant=tenant, retention=kept)
    (state,) = started.engine.retention()
    assert state.charged_blocks == 32
    other = prompt(11 * 16, first=3333)
    await started.run("other", other, max_tokens=1, tenant="modest", retention=kept)
    (state,) = started.engine.retention()
    assert state.charged_blocks == 43


# what only the mock does


async def test_mock_ranks_are_separate() -> None:
    made = await start_mock(dp_ranks=2)
    assert made.info.capacity.dp_ranks == 2
    made.submit("a", prompt(40), rank=1)
    await made.ended("a")
    assert (made.sink.held.get(0), len(made.sink.held[1])) == (None, 3)
    assert [load.requests for load in made.engine.load("i")] == [0, 1]
    await made.engine.close()


async def test_mock_output_that_is_due_leaves_with_the_acceptance() -> None:
    made, written = await start_mock(speedup=1e9), list[int]()
    made.submit("a", prompt(40), max_tokens=2)
    # the connection writes what has been posted in the next iteration of the loop
    asyncio.get_running_loop().call_soon(lambda: written.append(len(made.sink.tokens("a"))))
    await made.ended("a")
    assert written == [1]
    await made.engine.close()


async def test_mock_crash_is_reported() -> None:
    made = await start_mock(crash_step=5)
    made.submit("a", prompt(40), max_tokens=100)
    await eventually(lambda: made.sink.errors)
    assert "injected crash at step 5" in str(made.sink.errors[0])
    assert len(made.sink.tokens("a")) == 4
    await made.engine.close()


async def test_mock_hang_is_silent() -> None:
    made = await start_mock(hang_step=3)
    made.submit("a", prompt(40), max_tokens=100)
    await eventually(lambda: len(made.sink.tokens("a")) == 2)
    assert made.load().running == 1
    assert not made.sink.errors
    await made.engine.close()


async def test_mock_loses_events_on_request() -> None:
    made = await start_mock(lose_every=2)
    for i in range(4):
        made.submit(f"r{i}", prompt(40, first=i), max_tokens=1)
        await made.ended(f"r{i}")
    assert made.sink.lost_events == 2
    assert len(made.sink.held[0]) == 4
    await made.engine.close()


@pytest.mark.parametrize("option", ["script", "profile"])
async def test_mock_files_that_cannot_be_read_stop_the_start(option: str) -> None:
    with pytest.raises(EngineError, match=r"missing\.file"):
        await start_mock(**{option: model_dir() / "missing.file"})
