"""Workers that drain, crash or hang under load in a whole mesh: every answer stays complete."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from openai import AsyncOpenAI
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

SETTINGS = {
    "KVMESH_MOCK_SPEEDUP": "2",
    "KVMESH_WORKER_DRAIN_TIMEOUT_S": "0.1",
}
TOKENS = 150


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path, dict(SETTINGS))
    try:
        yield mesh
    finally:
        mesh.stop()


class Load:
    """Streams over the API, some always running; expected texts come from an undisturbed mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._client = AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)
        self.started = 0
        self.texts: dict[str, str] = {}

    async def stream(self, prompt: str) -> str:
        self.started += 1
        parts: list[str] = []
        chunks = await self._client.chat.completions.create(
            model="kvmesh-demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            stream=True,
        )
        async for chunk in chunks:
            parts += [c.delta.content for c in chunk.choices if c.delta.content]
        return "".join(parts)

    async def record(self, prompt: str) -> None:
        self.texts[prompt] = await self.stream(prompt)

    async def check(self) -> None:
        """Assert that each answer equals that of an undisturbed worker."""
        again = await asyncio.gather(*(self.stream(prompt) for prompt in self.texts))
        assert again == list(self.texts.values())

    async def close(self) -> None:
        await self._client.close()


async def test_a_rolling_restart_loses_nothing(mesh: Mesh) -> None:
    mesh.start_all(workers=2)
    await mesh.ready()
    load = Load(mesh)
    for number, name in enumerate(("worker-0", "worker-1")):
        tasks = [asyncio.create_task(load.record(f"restart {number} {i}")) for i in range(8)]
        await eventually(lambda: mesh.metric("kvmesh_frontend_active_requests") >= 8)
        await asyncio.to_thread(mesh.kill, name, signal.SIGTERM)
        mesh.restart(name)
        await asyncio.gather(*tasks)
        log = (mesh.folder / f"{name}.log").read_text
        await eventually(lambda log=log: log().count("serving kvmesh-demo") == 2)  # type: ignore[misc]
    await load.check()
    await load.close()


async def _survives(mesh: Mesh, fault: dict[str, str], log_line: str) -> None:
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    mesh.start("worker", "good")
    mesh.start("worker", "bad", **fault)
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    bad = mesh.folder / "bad.log"
    await eventually(lambda: "serving" in bad.read_text())
    load = Load(mesh)
    await asyncio.gather(*(load.record(f"fault {i}") for i in range(10)))
    assert log_line in bad.read_text()
    assert await asyncio.to_thread(mesh.processes["bad"].wait, PATIENCE_S) == 1
    await load.check()
    await load.close()


async def test_clients_do_not_see_a_crash_during_an_answer(mesh: Mesh) -> None:
    await _survives(mesh, {"KVMESH_MOCK_CRASH_STEP": "40"}, "injected crash at step 40")


async def test_clients_survive_a_hang_during_an_answer(mesh: Mesh) -> None:
    fault = {"KVMESH_MOCK_HANG_STEP": "40", "KVMESH_WORKER_HANG_TIMEOUT_S": "2"}
    await _survives(mesh, fault, "took no step for 2 s")
