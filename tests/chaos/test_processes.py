"""Kill any one process under load: the mesh recovers and every request is answered in full."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAIError
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

TOKENS = 40
WORKERS = 3


@pytest_asyncio.fixture
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "4", "KVMESH_FRONTEND_RESTART_WAIT_S": "60"}
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    try:
        mesh.start_all(WORKERS)
        await mesh.ready()
        yield mesh
    finally:
        mesh.stop()


class Traffic:
    """Eight clients that each ask again as soon as they are answered."""

    def __init__(self, url: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._running = True
        self.whole = 0
        self.failed: list[str] = []
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(8)]

    async def _ask(self, number: int) -> None:
        turn = 0
        while self._running:
            turn += 1
            try:
                await self._stream(f"Client {number}, turn {turn}. " * 30)
                self.whole += 1
            except (OpenAIError, AssertionError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def _stream(self, prompt: str) -> None:
        chunks = await self._client.chat.completions.create(
            model="kvmesh-demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = None
        async for chunk in chunks:
            usage = chunk.usage or usage
        assert usage is not None, "the stream broke off"
        assert usage.completion_tokens == TOKENS, f"{usage.completion_tokens} tokens"

    async def more(self, count: int = 16) -> None:
        """Wait until `count` more answers have arrived whole."""
        target = self.whole + count
        await eventually(lambda: self.whole >= target, what=f"{self.failed[-5:]}")

    async def stop(self) -> None:
        self._running = False
        await asyncio.wait(self._tasks, timeout=60)
        await self._client.close()


async def test_a_killed_worker_costs_no_request(mesh: Mesh) -> None:
    traffic = Traffic(mesh.url)
    await traffic.more()
    mesh.kill("worker-1")
    await traffic.more()
    mesh.restart("worker-1")
    await eventually(lambda: len(_workers(mesh)) == WORKERS)
    await traffic.more()
    await traffic.stop()
    assert traffic.failed == []


async def test_a_killed_router_is_replaced(mesh: Mesh) -> None:
    traffic = Traffic(mesh.url)
    await traffic.more()
    mesh.kill("router-0")
    mesh.restart("router-0")
    await traffic.more()
    await traffic.stop()
    assert traffic.failed == []


async def test_a_killed_indexer_is_replaced(mesh: Mesh) -> None:
    traffic = Traffic(mesh.url)
    await traffic.more()
    mesh.kill("indexer-0")
    await traffic.more()
    mesh.restart("indexer-0")
    await traffic.more()
    await traffic.stop()
    assert traffic.failed == []


async def test_a_killed_frontend_is_replaced(mesh: Mesh) -> None:
    traffic = Traffic(mesh.url)
    await traffic.more()
    mesh.kill("frontend-0")
    mesh.restart("frontend-0")
    await mesh.ready()
    await traffic.more()
    failed = len(traffic.failed)
    await traffic.more()
    await traffic.stop()
    assert len(traffic.failed) == failed  # only what was in flight, or came while it was down
    await eventually(lambda: mesh.metric("kvmesh_worker_running_requests") == 0)


async def test_a_restarted_bus_is_rejoined(nats_server: NatsServer, mesh: Mesh) -> None:
    traffic = Traffic(mesh.url)
    await traffic.more()
    await asyncio.to_thread(nats_server.restart)
    await traffic.more(32)
    failed = len(traffic.failed)
    await traffic.more(32)
    await traffic.stop()
    assert len(traffic.failed) == failed


def _workers(mesh: Mesh) -> set[str]:
    return {k for k in mesh.metrics() if k.startswith("kvmesh_worker_running_requests{")}
