"""Lost and frozen workers: migration of requests, suspects, and workers left out."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.frontend import (
    LIMITS,
    MODEL,
    TOKENIZER,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    attempt,
    client_session,
    events,
    frontend_mesh,
    scripted_router,
    scripted_worker,
)
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Chunk

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"


@dataclass
class Stage:
    bus: Bus
    client: Client
    router: ScriptedRouter


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with (
        frontend_mesh(nats_server.url, tmp_path_factory.mktemp("frontend")) as (mesh, bus),
        scripted_router(bus, LIMITS) as router,
        scripted_worker(bus, LIMITS, "first"),
        client_session() as session,
    ):
        await mesh.ready()
        yield Stage(bus, Client(mesh.url, session), router)


@pytest_asyncio.fixture(loop_scope="module")
async def workers(stage: Stage) -> AsyncIterator[list[ScriptedWorker]]:
    """Three that the router prefers in this order."""
    async with AsyncExitStack() as stack:
        made = []
        for name in ("a", "b", "c"):
            worker = scripted_worker(stage.bus, LIMITS, f"{name}{secrets.token_hex(4)}")
            made.append(await stack.enter_async_context(worker))
        stage.router.order = [worker.instance for worker in made]
        yield made


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **changes}


async def answer(worker: ScriptedWorker, number: int = 0) -> None:
    work = await worker.work(number)
    await worker.send(work, Chunk(work.request, work.generated, [300], finish="stop"))


async def test_a_request_that_hangs_two_workers_gets_work_to_no_third(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a, b, c = workers
    for worker in workers:
        worker.hangs = True
    data = msgspec.json.encode(body())
    async with stage.client.session.post(stage.client.url + CHAT, data=data) as response:
        assert response.status == 500
        assert response.headers["X-Should-Retry"] == "false"
        error = (await response.json())["error"]
    assert error["code"] == "engine_lost"
    assert "Two workers" in error["message"]
    assert [len(worker.works) for worker in (a, b, c)] == [1, 1, 0]


async def test_a_request_that_crashes_two_engines_gets_work_to_no_third(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a, b, c = workers
    response = await stage.client.stream(CHAT, body(stream=True))
    for worker, had in ((a, 0), (b, 1)):
        work = await worker.work()
        await worker.send(work, Chunk(work.request, had, [300]))
        failed = Chunk(work.request, had + 1, [], finish="abort", error="the engine died")
        await worker.send(work, failed)
    chunks = await events(response)
    assert "the engine died" in chunks[-2]["error"]["message"]
    assert chunks[-1] == "[DONE]"
    assert not c.works


async def test_an_error_says_what_the_last_worker_that_was_asked_said(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a = workers[0]
    stage.router.order, a.status = [a.instance], "overheated"
    status, answer = await stage.client.post(CHAT, body())
    assert status == 503
    assert f"(the last one asked, {a.instance}: overheated)" in answer["error"]["message"]


async def test_frozen_workers_are_passed_over_and_no_request_is_blamed(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a, b, c = workers
    a.frozen = b.frozen = True
    pending = [asyncio.create_task(stage.client.post(CHAT, body())) for _ in range(4)]
    for number in range(4):
        await answer(c, number)
    assert [status for status, _ in await asyncio.gather(*pending)] == [200] * 4


async def test_a_frozen_worker_gets_work_no_work_until_it_replies(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a, b, _ = workers
    a.frozen = True
    pending = asyncio.create_task(stage.client.post(CHAT, body()))
    await answer(b)
    assert (await pending)[0] == 200
    pending = asyncio.create_task(stage.client.post(CHAT, body()))
    await answer(b, 1)
    assert (await pending)[0] == 200
    assert len(a.works) == 1
    a.frozen = False

    async def gets_work() -> bool:
        had, others = len(a.works), len(b.works)
        pending = asyncio.create_task(stage.client.post(CHAT, body()))
        await eventually(lambda: len(a.works) > had or len(b.works) > others)
        offered = len(a.works) > had
        await answer(a if offered else b, had if offered else others)
        assert (await pending)[0] == 200
        return offered

    await eventually(gets_work, what="the worker gets work again")


async def test_late_tokens_of_a_lost_worker_are_dropped(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a, b, _ = workers
    response = await stage.client.stream(CHAT, body(stream=True))
    old = await a.work()
    await a.send(old, Chunk(old.request, 0, [300], finish="abort"))
    new = await b.work()
    await a.send(old, Chunk(old.request, 1, [301, 302], finish="stop"))
    await b.send(new, Chunk(new.request, 1, [303]))
    await a.send(old, Chunk(old.request, 2, [301], finish="stop"))
    await b.send(new, Chunk(new.request, 2, [304], finish="stop"))
    assert texts(await events(response)) == {0: decoded(300, 303, 304)}


async def test_a_migrated_stream_has_the_content_of_one_that_stayed(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a, b, _ = workers
    sent = body(stream=True, seed=7, logprobs=True, stream_options={"include_usage": True})
    known: list[dict[int, float]] = [{token: -0.5} for token in (300, 301, 302)]

    async def streamed(migrates: bool, number: int) -> tuple[Any, ...]:
        response = await stage.client.stream(CHAT, sent)
        worker, work = a, await a.work(number)
        first = Chunk(work.request, 0, [300], cached=[0], logprobs=known[:1])
        await a.send(work, first)
        if migrates:
            await a.send(work, Chunk(work.request, 1, [], finish="abort"))
            worker, work = b, await b.work()
            assert work.sampling.seed == 7
        cached = [32] if migrates else None  # each worker reports what it found
        rest = Chunk(work.request, 1, [301, 302], finish="stop", cached=cached, logprobs=known[1:])
        await worker.send(work, rest)
        chunks = await events(response)
        assert chunks[-1] == "[DONE]"
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
        logprobs = [
            entry for c in choices for entry in (c["logprobs"] or {"content": []})["content"]
        ]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        return texts(chunks), logprobs, ends, chunks[-2]["usage"]

    stayed = await streamed(False, 0)
    assert stayed == await streamed(True, 1)
    assert stayed[0] == {0: decoded(300, 301, 302)}
    assert stayed[3]["completion_tokens"] == 3


async def test_of_two_choices_only_the_one_on_the_lost_worker_migrates(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a, b, c = workers
    response = await stage.client.stream(CHAT, body(stream=True, n=2))
    one, other = await a.work(), await a.work(1)
    await a.send(one, Chunk(one.request, 0, [300]))
    await a.send(other, Chunk(other.request, 0, [310], finish="abort", error="the engine died"))
    moved = await b.work()
    assert attempt(moved).startswith(attempt(other))
    await b.send(moved, Chunk(moved.request, 1, [311], finish="stop"))
    await a.send(one, Chunk(one.request, 1, [301], finish="stop"))
    choices = texts(await events(response))
    index = int(attempt(other).rpartition("-")[2] == "1")
    assert choices == {1 - index: decoded(300, 301), index: decoded(310, 311)}
    assert (len(a.works), len(b.works), len(c.works)) == (2, 1, 0)


async def test_a_client_that_leaves_after_a_migration_frees_the_second_worker(
    stage: Stage, workers: list[ScriptedWorker]
) -> None:
    a, b, _ = workers
    response = await stage.client.stream(CHAT, body(stream=True))
    work = await a.work()
    await a.send(work, Chunk(work.request, 0, [300], finish="abort"))
    moved = await b.work()
    await b.send(moved, Chunk(moved.request, 1, [301]))
    await response.content.readany()
    response.close()
    await eventually(lambda: b.cancelled == [moved.request])
    assert a.cancelled == [work.request]


def decoded(*tokens: int) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


def texts(chunks: list[Any]) -> dict[int, str]:
    """The text of each choice of a stream."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            text = choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found
