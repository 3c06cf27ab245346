"""Contract of the engines that run anywhere, and abilities of the mock alone."""

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.engine_suite import EngineSuite
from support.engines import (
    ENGINES,
    StartedEngine,
    make_prefetch,
    prompt,
    running,
    sequence,
    start_mock,
)
from support.wait import eventually

from kvmesh.bus.messages import Retain
from kvmesh.demo import model_dir
from kvmesh.worker.adapters.prefetch import MAX_PREFETCHES
from kvmesh.worker.capabilities import Retaining
from kvmesh.worker.engine import EngineError


@pytest_asyncio.fixture(params=ENGINES)
async def started(request: pytest.FixtureRequest) -> AsyncIterator[StartedEngine]:
    async with running(request.param) as engine:
        yield engine


class TestEveryEngine(EngineSuite):
    """Engines that need an environment of their own are in tests/engines."""


async def test_clear_drops_unused_blocks_only(started: StartedEngine) -> None:
    started.submit("a", prompt(100), max_tokens=1)
    await started.ended("a")
    started.submit("b", prompt(50, first=5), max_tokens=200)
    await eventually(lambda: started.sink.tokens("b"))
    started.engine.clear()
    assert not started.sink.held[0] & set(sequence(prompt(100)))
    assert set(sequence(prompt(50, first=5))) <= started.sink.held[0]
    started.engine.abort("b")


async def test_a_tenant_clears_its_own_alone_even_if_salts_collide(started: StartedEngine) -> None:
    tokens, size = prompt(64), started.size
    await started.run("a", tokens, max_tokens=1, tenant="a" * 32)
    assert isinstance(started.engine, Retaining)
    everywhere = range(4)
    assert await started.engine.drop(started.salt, "b" * 32, everywhere) == 0
    assert await started.engine.drop(started.salt, "", everywhere) == 0
    await started.run("again", tokens, max_tokens=1, tenant="a" * 32)
    assert started.sink.cached("again") == 3 * size
    assert await started.engine.drop(started.salt, "a" * 32, everywhere) == 4


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


async def test_a_prefetch_loads_nothing_of_a_tenant_whose_salt_collides(
    started: StartedEngine,
) -> None:
    tokens = prompt(64)
    await started.run("a", tokens, max_tokens=1, tenant="a" * 32)
    cached = started.load().cached_blocks
    command = make_prefetch(tokens + prompt(20, first=3), tenant="b" * 32, compute=0)
    assert (await started.execute(command)).ok
    await eventually(lambda: not started.engine.abort("p"), what="it has ended")
    assert started.load().cached_blocks == cached
    await started.run("b", tokens, max_tokens=1, tenant="b" * 32)
    assert started.sink.cached("b") == 0


async def test_prefetches_of_one_owner_give_way_to_those_of_others(started: StartedEngine) -> None:
    tokens, later = prompt(100), time.time() + 3600

    async def prefetch(name: str, tenant: str, at: float = later) -> str:
        command = make_prefetch(tokens, name, at=at, tenant=tenant)
        return (await started.execute(command)).reason

    for number in range(MAX_PREFETCHES):
        assert not await prefetch(f"greedy{number}", f"greedy/{number}", later + number)
    assert await prefetch("more", "greedy/new") == f"{MAX_PREFETCHES} prefetches are in progress"
    assert not await prefetch("modest", "modest")
    assert not started.engine.abort(f"greedy{MAX_PREFETCHES - 1}"), "the last one was replaced"
    assert started.engine.abort("modest")
    assert not await prefetch("one", "modest/part")
    for number in range(MAX_PREFETCHES - 1):
        started.engine.abort(f"greedy{number}")


async def test_a_prefetch_computes_a_bounded_number_of_tokens_without_output(
    started: StartedEngine,
) -> None:
    tokens = prompt(200)
    await started.run("a", tokens[: 4 * 40], max_tokens=1)
    assert not (await started.execute(make_prefetch(tokens, compute=70))).reason
    there = set(sequence(tokens)[: 2 + 4])
    await eventually(lambda: started.held_hashes == there, timeout=30, what="they are computed")
    await eventually(lambda: not started.load().active_blocks, timeout=30, what="it has ended")
    assert list(started.sink.deltas) == ["a"]
    await started.run("b", tokens, max_tokens=1)
    assert started.sink.cached("b") == 6 * 16


async def test_a_prefetch_waits_for_its_time_and_ends_when_it_is_of_no_use(
    started: StartedEngine,
) -> None:
    tokens, later = prompt(100), time.time() + 3600
    for name, of in (("p", tokens), ("q", tokens), ("other", prompt(100, first=5))):
        assert (await started.execute(make_prefetch(of, name, at=later, compute=100))).ok
    assert started.engine.abort("q")
    assert not started.engine.abort("q")
    await started.run("a", tokens + prompt(20, first=7), max_tokens=1)
    assert not started.engine.abort("p"), "the request is here"
    assert started.engine.abort("other")
    assert started.held_hashes == set(sequence(tokens + prompt(20, first=7)))


async def test_a_prefetch_that_comes_to_nothing_is_refused(started: StartedEngine) -> None:
    reasons = [
        (await started.execute(unfit)).reason
        for unfit in (make_prefetch(prompt(15)), make_prefetch(prompt(50), rank=9))
    ]
    assert reasons == ["the prompt has no full block", "there is no rank 9"]
    started.submit("p", prompt(50), max_tokens=400)
    assert (await started.execute(make_prefetch(prompt(50)))).reason == "a request has this id"
    assert started.engine.abort("p")


# what only the mock does


async def test_mock_ranks_are_separate() -> None:
    made = await start_mock(dp_ranks=2)
    assert made.info.capacity.dp_ranks == 2
    made.submit("a", prompt(40), rank=1)
    await made.ended("a")
    assert (made.sink.held.get(0), len(made.sink.held[1])) == (None, 3)
    assert [load.requests for load in made.engine.load("i")] == [0, 1]
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
