"""API keys over a whole mesh: created on the command line, their limits shared by frontends."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support import forks
from support.frontend import (
    LIMITS,
    MODEL,
    Client,
    ScriptedWorker,
    client_session,
    scripted_router,
    scripted_worker,
)
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Chunk
from kvmesh.bus.streams.configuration import ensure_streams

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
TEXT = {"model": MODEL, "prompt": "Hello"}


@dataclass
class Stage:
    mesh: Mesh
    a: Client
    b: Client
    worker: ScriptedWorker

    def keys(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        nats = ("--nats-url", self.mesh.nats_url, "--nats-namespace", self.mesh.namespace)
        return forks.run(("keys", *arguments, *nats), os.environ, PATIENCE_S)

    async def key(self, name: str, *options: str) -> dict[str, str]:
        """The headers of a new key, once both frontends have loaded it."""
        made = await asyncio.to_thread(self.keys, "add", name, *options)
        assert made.returncode == 0, made.stderr
        return await self.loaded_key(made.stdout.strip())

    async def loaded_key(self, secret: str) -> dict[str, str]:
        headers = {"x-api-key": secret}
        for client in (self.a, self.b):
            await eventually_status(client, headers, 200)
        return headers


async def eventually_status(client: Client, headers: dict[str, str], status: int) -> None:
    """Wait for a status of /v1/models; it counts only against limits of requests per minute."""

    async def has_status() -> bool:
        async with client.session.get(client.url + "/v1/models", headers=headers) as answer:
            return answer.status == status

    async with asyncio.timeout(PATIENCE_S):
        while not await has_status():
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    env = {"KVMESH_FRONTEND_KEYS_BUCKET": "true", **stream_env(LIMITS)}
    folder: Path = tmp_path_factory.mktemp("limits")
    mesh = Mesh(nats_server.url, folder, env)
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    other = free_port()
    async with (
        scripted_router(bus, LIMITS) as router,
        scripted_worker(bus, LIMITS, "a") as worker,
        client_session() as session,
    ):
        router.order = [worker.instance]
        mesh.start("frontend", "frontend-0")
        mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(other))
        a, b = Client(mesh.url, session), Client(f"http://127.0.0.1:{other}", session)
        for client in (a, b):
            await healthy(client)
        yield Stage(mesh, a, b, worker)
    mesh.stop()
    await bus.close()


async def healthy(client: Client) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with client.session.get(client.url + "/health") as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.1)


async def count(client: Client, headers: dict[str, str]) -> int:
    return (await client.post("/v1/tokenize", TEXT, **headers))[0]


async def test_a_rate_holds_over_all_frontends(stage: Stage) -> None:
    key = await stage.key("rate", "--requests-per-minute", "600")
    served, began = 0, time.monotonic()
    for _ in range(1000):
        statuses = [await count(client, key) for client in (stage.a, stage.b)]
        served += statuses.count(200)
        if statuses == [429, 429]:
            break
    came_in = 10 * (time.monotonic() - began)
    # Two frontends on their own would serve 1,200. They know of each other's use 10 ms later.
    assert 500 <= served <= 800 + came_in
    assert statuses == [429, 429]


async def eventually_counted(client: Client, headers: dict[str, str], status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await count(client, headers) != status:
            await asyncio.sleep(0.05)


async def test_concurrency_counts_over_all_frontends(stage: Stage) -> None:
    key = await stage.key("few", "--concurrency", "2")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "n": 2}
    before = len(stage.worker.works)
    running = asyncio.create_task(stage.a.post(CHAT, body, **key))
    works = [await stage.worker.work(before + place) for place in range(2)]
    await eventually_counted(stage.b, key, 429)
    for work in works:
        await stage.worker.send(work, Chunk(work.request, 0, [300], finish="stop"))
    assert (await running)[0] == 200
    await eventually_counted(stage.b, key, 200)
    status, answer = await stage.b.post(CHAT, {**body, "n": 4}, **key)
    assert (status, answer["error"]["code"]) == (403, "concurrency_exceeded")


async def test_the_use_of_a_dead_frontend_stops_counting(stage: Stage) -> None:
    key = await stage.key("one", "--concurrency", "1")
    port = free_port()
    stage.mesh.start("frontend", "mortal", KVMESH_FRONTEND_PORT=str(port))
    mortal = Client(f"http://127.0.0.1:{port}", stage.a.session)
    await healthy(mortal)
    before = len(stage.worker.works)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    running = asyncio.create_task(mortal.post(CHAT, body, **key))
    await stage.worker.work(before)
    await eventually_counted(stage.a, key, 429)
    stage.mesh.kill("mortal")
    await eventually_counted(stage.a, key, 200)
    await asyncio.wait([running])
    assert running.exception() is not None


async def test_a_key_is_listed_rotated_and_revoked(stage: Stage) -> None:
    old = await stage.key("ci", "--tenant", "team", "--models", MODEL, "--expires", "30d")
    again = await asyncio.to_thread(stage.keys, "add", "ci")
    assert again.returncode == 1
    assert "rotate" in again.stderr
    listed = await asyncio.to_thread(stage.keys, "list")
    line = next(line for line in listed.stdout.splitlines() if line.startswith("ci:"))
    assert f"tenant team, models {MODEL}, expires " in line
    assert old["x-api-key"] not in listed.stdout
    rotated = await asyncio.to_thread(stage.keys, "rotate", "ci", "--grace", "1h")
    new = await stage.loaded_key(rotated.stdout.strip())
    assert await count(stage.a, old) == await count(stage.a, new) == 200
    at_once = await asyncio.to_thread(stage.keys, "rotate", "ci", "--grace", "0s")
    newest = await stage.loaded_key(at_once.stdout.strip())
    await eventually_status(stage.a, new, 401)
    await eventually_status(stage.b, old, 401)
    assert (await asyncio.to_thread(stage.keys, "revoke", "ci")).returncode == 0
    await eventually_status(stage.a, newest, 401)
    assert (await asyncio.to_thread(stage.keys, "revoke", "ci")).returncode == 1
    assert "ci:" not in (await asyncio.to_thread(stage.keys, "list")).stdout


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("add",), "name"),
        (("add", "x", "--concurrency", "0"), "--concurrency 0"),
        (("add", "x", "--scopes", "cache,all"), "--scopes cache,all"),
        (("add", "x", "--expires", "soon"), "--expires soon"),
        (("rotate", "x", "--tenant", "t"), "cannot set fields"),
        (("list", "x"), "no name"),
    ],
)
async def test_an_invalid_key_is_refused(
    stage: Stage, arguments: tuple[str, ...], fault: str
) -> None:
    done = await asyncio.to_thread(stage.keys, *arguments)
    assert done.returncode == 2
    assert fault in done.stderr


async def test_a_key_sees_the_models_that_it_may_use(stage: Stage) -> None:
    free, bound = await stage.key("free"), await stage.key("bound", "--models", "other")

    async def get(path: str, headers: dict[str, str]) -> tuple[int, Any]:
        async with stage.a.session.get(stage.a.url + path, headers=headers) as answer:
            return answer.status, await answer.json()

    assert [m["id"] for m in (await get("/v1/models", free))[1]["data"]] == [MODEL]
    assert (await get("/v1/models", bound))[1]["data"] == []
    assert (await get(f"/v1/models/{MODEL}", free))[0] == 200
    assert (await get(f"/v1/models/{MODEL}", bound))[0] == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/tokenize"),
        ("POST", "/v1/detokenize"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses/input_tokens"),
        ("GET", "/v1/responses/resp_x"),
        ("GET", "/v1/responses/resp_x/input_items"),
        ("DELETE", "/v1/responses/resp_x"),
        ("GET", "/v1/models"),
        ("POST", CHAT),
        ("POST", "/v1/prefetch"),
    ],
)
async def test_limits_hold_on_every_endpoint(stage: Stage, method: str, path: str) -> None:
    name = f"all-{method}-{path.replace('/', '-')}"
    made = await asyncio.to_thread(stage.keys, "add", name, "--requests-per-minute", "4")
    headers = {"x-api-key": made.stdout.strip()}

    async def status() -> int:
        body = None if method == "GET" else b"{}"
        url = stage.a.url + path
        async with stage.a.session.request(method, url, headers=headers, data=body) as answer:
            return answer.status

    async with asyncio.timeout(PATIENCE_S):
        while await status() == 401:
            await asyncio.sleep(0.05)
    for _ in range(4):
        last = await status()
    assert last == 429


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/openapi.json"])
async def test_callers_without_a_key_see_nothing_of_the_mesh(stage: Stage, path: str) -> None:
    plain, admin = (
        await stage.key(f"p{path[1]}"),
        await stage.key(f"a{path[1]}", "--scopes", "admin"),
    )

    async def status(headers: dict[str, str]) -> int:
        async with stage.a.session.get(stage.a.url + path, headers=headers) as answer:
            return answer.status

    assert await status({}) == 401
    assert await status(plain) == (403 if path == "/metrics" else 200)
    assert await status(admin) == 200


async def test_a_stopping_frontend_serves_during_its_linger_time(stage: Stage) -> None:
    key = await stage.key("late")
    port = free_port()
    env = {"KVMESH_FRONTEND_PORT": str(port), "KVMESH_FRONTEND_LINGER_S": "3"}
    stage.mesh.start("frontend", "lingering", **env)
    client = Client(f"http://127.0.0.1:{port}", stage.a.session)
    await healthy(client)
    stage.mesh.processes["lingering"].send_signal(signal.SIGTERM)

    async def health() -> int:
        async with client.session.get(client.url + "/health") as answer:
            return answer.status

    async with asyncio.timeout(PATIENCE_S):
        while await health() != 503:
            await asyncio.sleep(0.01)
    assert await count(client, key) == 200
    process = stage.mesh.processes.pop("lingering")
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
