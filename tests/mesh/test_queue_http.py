"""The router's queue as HTTP clients see it: order by priority, and refusal beyond its limit."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from support.apis import APIS, CHAT, MESSAGES, Api, Content
from support.frontend import Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import MessageDecoder, SeqAdd, SeqBatch, SeqWait

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT = 3
STEP = 2048  # tokens


def unique(words: int) -> str:
    """A text of about this many words with a unique prefix."""
    return f"Task {secrets.token_hex(8)}. " + "word " * words


@dataclass
class Stage:
    """A mesh whose one worker computes one prompt at a time; up to LIMIT others wait."""

    mesh: Mesh
    client: Client
    tasks: list[asyncio.Task[Any]]
    order: list[str]
    routed: set[str]  # requests that the router has placed or queued

    async def send(self, name: str, api: Api, body: dict[str, Any], **headers: str) -> None:
        """Start a request, which appends its name to `order` when it ends."""

        async def run() -> Content:
            content = await api.send(self.client, body, **headers)
            self.order.append(name)
            return content

        self.tasks.append(asyncio.create_task(run()))

    async def queue(self, name: str, api: Api, nvext: dict[str, Any], **headers: str) -> None:
        """Send a request that waits in the router's queue behind the blocker."""
        await self.send(name, api, api.body(unique(100), 1, nvext=nvext), **headers)
        await self.arrived()

    async def block(self) -> None:
        """Occupy the worker for the seconds of a test's preparations."""
        await self.send("blocker", CHAT, CHAT.body(unique(24 * STEP), 1))
        await self.arrived()

    async def arrived(self) -> None:
        """Wait until the router has placed or queued all sent requests."""
        await eventually(lambda: len(self.routed) == len(self.tasks), what="requests routed")
        assert not self.order, "the blocker has ended too early"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    env = {
        "KVMESH_MOCK_SPEEDUP": "0.4",
        "KVMESH_MOCK_MAX_BATCHED_TOKENS": str(STEP),
        "KVMESH_ROUTER_QUEUE_THRESHOLD": "0.01",
        "KVMESH_ROUTER_QUEUE_LIMIT": str(LIMIT),
    }
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("queue"), env)
    mesh.start_all(workers=1)
    await mesh.ready()
    routed: set[str] = set()

    def on_batch(batch: SeqBatch) -> None:
        routed.update(e.request for e in batch.events if isinstance(e, SeqAdd | SeqWait))

    bus = await Bus.connect(mesh.options, "test")
    await bus.subscribe(bus.subjects.seq_all, MessageDecoder(SeqBatch), on_batch)
    await bus.flush()
    async with client_session() as session:
        yield Stage(mesh, Client(mesh.url, session), [], [], routed)
    await bus.close()
    mesh.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> AsyncIterator[Stage]:
    shared.tasks.clear()
    shared.order.clear()
    shared.routed.clear()
    yield shared
    await asyncio.gather(*shared.tasks)


def hinted(**hints: Any) -> dict[str, Any]:
    return {"agent_hints": hints}


async def test_priority_orders_the_queue(stage: Stage) -> None:
    await stage.block()
    await stage.queue("plain", CHAT, {})
    await stage.queue("urgent", CHAT, hinted(priority=60))
    await stage.queue("strict", CHAT, hinted(strict_priority=1))
    await asyncio.gather(*stage.tasks)
    assert stage.order == ["blocker", "strict", "urgent", "plain"]


async def test_a_latency_sensitive_request_goes_first(
    stage: Stage,
) -> None:
    await stage.block()
    await stage.queue("plain", MESSAGES, {})
    await stage.queue("sensitive", MESSAGES, hinted(latency_sensitivity=1.0))
    await asyncio.gather(*stage.tasks)
    assert stage.order == ["blocker", "sensitive", "plain"]


async def test_a_full_queue_refuses_every_api(stage: Stage) -> None:
    await stage.block()
    for number in range(LIMIT):
        await stage.queue(f"waiting {number}", CHAT, {})
    for api in APIS:
        response = await stage.client.stream(api.path, api.body(unique(100), 1))
        assert response.status == (529 if api is MESSAGES else 429)
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "overloaded_error"
    await asyncio.gather(*stage.tasks)
    assert len(stage.order) == LIMIT + 1
