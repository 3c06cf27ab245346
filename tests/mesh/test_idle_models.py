"""Models that may run without workers: listed, and woken by requests that wait for a worker."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.apis import Api, every_api
from support.frontend import CONTEXT, LIMITS, MODEL, Client, client_session, events, scripted_worker
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import IdleModel, MessageDecoder, ModelCard, Wake, encode
from kvmesh.bus.storage.model_files import publish_model
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.cli.status.report import gather
from kvmesh.demo import model_dir
from kvmesh.settings import Settings

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
MAX_WAKING = 8
SETTINGS = {
    "KVMESH_FRONTEND_KEEPALIVE_S": "0.5",
    "KVMESH_FRONTEND_RESTART_WAIT_S": "1",
    "KVMESH_FRONTEND_MAX_WAKING": str(MAX_WAKING),
    "KVMESH_FRONTEND_WAKE_TIMEOUT_S": str(5 * PATIENCE_S),
    **stream_env(LIMITS),
}
IMPATIENT = {
    "KVMESH_FRONTEND_KEEPALIVE_S": str(PATIENCE_S),
    "KVMESH_FRONTEND_WAKE_TIMEOUT_S": "0.3",
}
WAITING = f'kvmesh_frontend_waking_sequences{{model="{MODEL}"}}'


@dataclass
class Stage:
    """A router and two frontends without workers; the `impatient` one waits for a short time."""

    mesh: Mesh
    bus: Bus
    client: Client
    impatient: Client
    entry: IdleModel
    wakes: list[Wake] = field(default_factory=list)

    async def list_model(self) -> None:
        bucket = await self.bus.js.key_value(self.bus.subjects.plan_bucket)
        await bucket.put(self.bus.subjects.idle_key(MODEL), encode(self.entry))

    async def remove_model(self) -> None:
        bucket = await self.bus.js.key_value(self.bus.subjects.plan_bucket)
        await bucket.delete(self.bus.subjects.idle_key(MODEL))

    async def names(self) -> list[str]:
        """The models that the frontend lists."""
        async with self.client.session.get(f"{self.client.url}/v1/models") as response:
            return [entry["id"] for entry in (await response.json())["data"]]

    def waiting(self) -> float:
        return self.mesh.metrics().get(WAITING, 0.0)

    async def waits(self, count: int) -> None:
        """Return once `count` sequences wait in the patient frontend."""
        await eventually(lambda: self.waiting() == count, what=f"{count} sequences wait")

    async def woken(self, count: int) -> Wake:
        """The first wake for `count` sequences."""
        found = await eventually(lambda: [wake for wake in self.wakes if wake.waiting == count])
        return found[0]

    async def idle(self) -> None:
        """Return once no frontend knows a worker."""
        for name in [name for name in self.mesh.processes if name.startswith("worker")]:
            self.mesh.kill(name, signal.SIGTERM)

        async def idle() -> bool:
            report = await gather(self.bus, Settings())
            return [model.name for model in report.idle_models] == [MODEL]

        await eventually(idle, what="the model is idle")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("idle")
    mesh = Mesh(nats_server.url, folder, SETTINGS)
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    files = await publish_model(bus, model_dir())
    card = ModelCard(name=MODEL, context=CONTEXT, block_size=16, files=files)
    port = free_port()
    async with client_session() as session:
        impatient = Client(f"http://127.0.0.1:{port}", session)
        client = Client(mesh.url, session)
        stage = Stage(mesh, bus, client, impatient, IdleModel(card=card, planner="planner-1"))
        await stage.list_model()
        await bus.subscribe(bus.subjects.wake_all, MessageDecoder(Wake), stage.wakes.append)
        mesh.start("router", "router-0", KVMESH_ROUTER_KV_EVENTS="false")
        mesh.start("frontend", "frontend-0")
        mesh.start("frontend", "frontend-1", KVMESH_FRONTEND_PORT=str(port), **IMPATIENT)
        await mesh.ready()
        await eventually(lambda: healthy(impatient), what="both frontends are ready")
        yield stage
    mesh.stop()
    await bus.close()


async def healthy(client: Client) -> bool:
    try:
        async with client.session.get(f"{client.url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> AsyncIterator[Stage]:
    """The mesh without workers, and its idle model listed."""
    shared.wakes.clear()
    yield shared
    await shared.list_model()
    await shared.idle()
    await eventually(lambda: healthy(shared.client))
    await shared.waits(0)


def body(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": 20, "nvext": {"ignore_eos": True}}
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": MODEL, "messages": messages, **fields, **changes}


@every_api
async def test_requests_wait_for_the_worker_that_they_wake(stage: Stage, api: Api) -> None:
    assert await stage.names() == [MODEL]
    whole = asyncio.create_task(api.send(stage.client, api.body("Hello", 20)))
    await stage.waits(1)
    stream = await stage.client.stream(api.path, api.body("Hello", 20, stream=True))
    assert stream.status == 200  # after `keepalive_s`: no worker runs yet
    await stage.waits(2)
    wake = await stage.woken(2)
    assert wake.model == MODEL
    assert wake.frontend.startswith("frontend-0-")
    assert wake.tokens > 0
    assert {w.request for w in stage.wakes} == {wake.request}  # the one that has waited longest
    assert not whole.done()
    stage.mesh.start("worker", "worker-0", KVMESH_MOCK_SPEEDUP="50")
    assert (await whole).output > 0
    assert await events(stream)
    await stage.waits(0)
    posted = len(stage.wakes)
    assert (await api.send(stage.client, api.body("Hello", 20))).output > 0
    assert len(stage.wakes) == posted


async def test_wakes_are_repeated_while_a_request_waits(stage: Stage) -> None:
    response = asyncio.create_task(stage.client.post(CHAT, body()))
    await eventually(lambda: len(stage.wakes) > 1, what="the wake is repeated")
    first, second = stage.wakes[:2]
    assert (first.request, first.waiting) == (second.request, 1)
    assert second.time - first.time >= 1.0
    response.cancel()


@every_api
async def test_a_request_without_a_worker_in_time_gets_the_api_s_error(
    stage: Stage, api: Api
) -> None:
    response = await stage.impatient.stream(api.path, api.body("Hello", 20))
    assert response.status == 503
    assert int(response.headers["Retry-After"]) >= 1
    error = (await response.json())["error"]
    assert error["message"] == f"No worker of `{MODEL}` has started in time."
    assert ("code" in error) == (api.name != "messages")


async def test_a_client_that_leaves_frees_its_place(stage: Stage) -> None:
    requests = [asyncio.create_task(stage.client.post(CHAT, body())) for _ in range(MAX_WAKING)]
    await stage.waits(MAX_WAKING)
    status, refusal = await stage.client.post(CHAT, body())
    assert (status, refusal["error"]["code"]) == (429, "overloaded")
    status, refusal = await stage.client.post("/v1/messages", body())
    assert (status, refusal["error"]["type"]) == (529, "overloaded_error")
    for request in requests:
        request.cancel()
    await stage.waits(0)
    request = asyncio.create_task(stage.client.post(CHAT, body()))
    await stage.waits(1)
    request.cancel()


async def test_requests_wait_again_when_the_last_worker_dies(stage: Stage) -> None:
    stage.mesh.start("worker", "worker-0", KVMESH_MOCK_SPEEDUP="1")
    stream = await stage.client.stream(CHAT, body(max_tokens=300, stream=True))
    begin = await stream.content.readuntil(b"content")
    stage.mesh.kill("worker-0")
    await stage.waits(1)
    later = asyncio.create_task(stage.client.post(CHAT, body()))
    await stage.waits(2)
    await stage.woken(2)
    stage.mesh.start("worker", "worker-1", KVMESH_MOCK_SPEEDUP="50")
    assert (await later)[0] == 200
    *_, last, done = await events(stream, begin)
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


async def test_requests_wait_after_a_drain_and_a_loss_that_the_bus_has_not_noticed(
    stage: Stage,
) -> None:
    async with scripted_worker(stage.bus, LIMITS, "leaving") as leaving:
        leaving.status = "draining"
        drained = asyncio.create_task(stage.client.post(CHAT, body()))
        await leaving.work()
    await stage.waits(1)
    stage.mesh.start("worker", "worker-0", KVMESH_MOCK_SPEEDUP="50")
    assert (await drained)[0] == 200
    await stage.waits(0)
    stage.mesh.processes["worker-0"].send_signal(signal.SIGSTOP)
    frozen = asyncio.create_task(stage.client.post(CHAT, body()))
    await stage.waits(1)  # when its lease has ended, long after `restart_wait_s`
    stage.mesh.kill("worker-0")
    stage.mesh.start("worker", "worker-1", KVMESH_MOCK_SPEEDUP="50")
    assert (await frozen)[0] == 200


async def test_a_restarted_frontend_lists_an_idle_model(stage: Stage) -> None:
    stage.mesh.kill("frontend-0")
    stage.mesh.restart("frontend-0")
    await stage.mesh.ready()
    assert await stage.names() == [MODEL]
    response = asyncio.create_task(stage.client.post(CHAT, body()))
    await stage.waits(1)
    response.cancel()


async def test_a_frontend_that_stops_ends_the_waits(stage: Stage) -> None:
    port = free_port()
    stage.mesh.start(
        "frontend",
        "frontend-2",
        KVMESH_FRONTEND_PORT=str(port),
        KVMESH_FRONTEND_DRAIN_TIMEOUT_S="0.2",
    )
    client = Client(f"http://127.0.0.1:{port}", stage.client.session)
    await eventually(lambda: healthy(client), what="the frontend is ready")
    response = asyncio.create_task(client.post(CHAT, body()))
    await stage.woken(1)
    stage.mesh.kill("frontend-2", signal.SIGTERM)
    status, refusal = await response
    assert (status, refusal["error"]["message"]) == (503, "The server is stopping.")


async def test_a_model_that_may_no_longer_be_idle_is_unavailable(stage: Stage) -> None:
    response = asyncio.create_task(stage.client.post(CHAT, body()))
    await stage.waits(1)
    await stage.remove_model()
    status, refusal = await response
    assert (status, refusal["error"]["code"]) == (503, "unavailable")
    assert await stage.names() == []
    assert not await healthy(stage.client)


async def test_unreadable_entries_are_ignored(stage: Stage) -> None:
    bucket = await stage.bus.js.key_value(stage.bus.subjects.plan_bucket)
    await bucket.put(stage.bus.subjects.idle_key("broken"), b"\xc1")
    await bucket.put(stage.bus.subjects.idle_key("other"), encode(stage.entry))
    await eventually(lambda: "ignored the idle model" in stage.mesh.logs())
    assert "ignored an unreadable idle model" in stage.mesh.logs()
    assert await stage.names() == [MODEL]
    for name in ("broken", "other"):
        await bucket.delete(stage.bus.subjects.idle_key(name))
