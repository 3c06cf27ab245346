"""Workers whose replies were lost with the frontend's own connection are not given up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest_asyncio
from support.frontend import (
    MODEL,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    client_session,
    scripted_router,
    scripted_worker,
)
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.proxy import Proxy
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Chunk
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=30.0)


@dataclass
class Stage:
    mesh: Mesh
    proxy: Proxy
    client: Client
    router: ScriptedRouter
    workers: list[ScriptedWorker]

    def send(self) -> asyncio.Task[tuple[int, object]]:
        return asyncio.create_task(self.client.post(CHAT, BODY))

    async def answered(self, pending: asyncio.Task[tuple[int, object]], by: ScriptedWorker) -> int:
        """The response's status, once this worker has received and ended the request."""
        work = await by.work()
        await by.send(work, Chunk(work.request, work.generated, [300], finish="stop"))
        return (await pending)[0]


@pytest_asyncio.fixture
async def stage(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Stage]:
    """One frontend behind a proxy; a router that prefers the first of three workers."""
    mesh = Mesh(nats_server.url, tmp_path, stream_env(LIMITS))
    proxy = Proxy(nats_server.port)
    proxy.start()
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(scripted_router(bus, LIMITS))
        workers = [
            await stack.enter_async_context(scripted_worker(bus, LIMITS, name)) for name in "abc"
        ]
        router.order = [worker.instance for worker in workers]
        mesh.start("frontend", "frontend-0", KVMESH_NATS_URL=proxy.url)
        session = await stack.enter_async_context(client_session())
        await mesh.ready()
        yield Stage(mesh, proxy, Client(mesh.url, session), router, workers)
        mesh.stop()
    await bus.close()
    proxy.stop()


async def test_a_request_is_dispatched_again_to_a_worker_that_reconnects_later(
    stage: Stage,
) -> None:
    worker = stage.workers[0]
    stage.router.order = [worker.instance]
    stage.router.queues_all = True
    pending = stage.send()
    await eventually(lambda: stage.router.requests, what="the request waits in the router")
    await worker.unsubscribe()
    stage.router.queues_all = False
    stage.proxy.cut()
    await eventually(lambda: left_unanswered(stage.router, worker), what="it did not reply")
    await worker.listen()
    assert await stage.answered(pending, worker) == 200
    assert "is gone" not in stage.mesh.logs()


def left_unanswered(router: ScriptedRouter, worker: ScriptedWorker) -> bool:
    """True if the worker was offered a request and did not reply."""
    return worker.instance in router.requests[-1].placement.exclude


async def test_no_request_is_suspected_for_an_answer_lost_with_the_connection(
    stage: Stage,
) -> None:
    first, second, third = stage.workers
    first.frozen = True
    pending = stage.send()
    await first.work()
    stage.proxy.cut()
    work = await second.work()
    failed = Chunk(work.request, 0, [300], finish="abort", error="the engine died")
    await second.send(work, failed)
    assert await stage.answered(pending, third) == 200
