"""A server whose KV events the index cannot use: doctor, top, explain, metrics and Clear say so."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.api_server import ApiServer
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh, scrape
from support.nats import NatsServer, free_port
from support.wait import eventually

from kvmesh.demo import model_dir

ODD = 10  # tokens of a block in the events, of which the mesh has no use


class OddEvents:
    """Publishes the events of a server with blocks of another size."""

    def __init__(self, server: ApiServer) -> None:
        self._inner = server.publisher

    async def send(self, *events: dict[str, Any]) -> None:
        for event in events:
            if event["type"] == "BlockStored":
                tokens = event["token_ids"][: ODD * len(event["block_hashes"])]
                event = {**event, "block_size": ODD, "token_ids": tokens}
            await self._inner.send(event)


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    made = Mesh(nats_server.url, tmp_path, {"KVMESH_LOG_LEVEL": "info"}, metrics_port=free_port())
    for role in ("indexer", "router"):
        made.start(role, f"{role}-0")
    made.start("frontend", "frontend-0", KVMESH_FRONTEND_METRICS_PORT=str(made.metrics_port))
    yield made
    made.stop()


Serve = Callable[..., Awaitable[ApiServer]]


@pytest_asyncio.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Start a server in a folder of that name."""
    servers: list[ApiServer] = []

    async def begin(name: str, style: str = "vllm", odd: bool = False, **more: Any) -> ApiServer:
        folder = tmp_path / name
        folder.mkdir()
        server = ApiServer(folder, style, prompt_details=True, **more)
        if odd:
            server.events = OddEvents(server)
        await server.start()
        servers.append(server)
        return server

    yield begin
    for server in servers:
        await server.close()


def sidecar(mesh: Mesh, name: str, server: ApiServer) -> None:
    mesh.start(
        "worker",
        name,
        KVMESH_WORKER_ENGINE="openai",
        KVMESH_WORKER_MODEL=str(model_dir()),
        KVMESH_REMOTE_URL=server.url,
        KVMESH_REMOTE_KV_EVENTS=server.publisher.endpoint,
        KVMESH_REMOTE_KV_REPLAY=server.publisher.replay,
    )


async def ask(mesh: Mesh, turns: int) -> dict[str, Any]:
    """Ask for the next answer of one conversation; the response."""
    content = "An agent reads and writes files. " * (8 + turns)
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    async with client_session() as session:
        status, answer = await Client(mesh.url, session).post("/v1/chat/completions", body)
    assert status == 200, answer
    return dict(answer)


async def clear(mesh: Mesh, **body: Any) -> dict[str, Any]:
    async with client_session() as session:
        given = {"model": MODEL, "all_tenants": True, **body}
        status, answer = await Client(mesh.url, session).post("/v1/cache/clear", given)
    assert status == 200, answer
    return dict(answer)


async def findings(mesh: Mesh) -> dict[str, list[str]]:
    done = await mesh.command("doctor", "--json")
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        finding = json.loads(line)
        if finding["severity"] == "fault":
            found.setdefault(finding["check"], []).append(finding["text"])
    return found


@pytest.mark.parametrize("style", ["vllm", "sglang"])
async def test_an_index_that_lacks_what_the_engine_serves(
    mesh: Mesh, serve: Serve, style: str
) -> None:
    sidecar(mesh, "sidecar", await serve("server", style, odd=True))
    await mesh.ready()
    answers = [await ask(mesh, turn) for turn in range(10)]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert all(cached[1:])

    async def found() -> bool:
        faults = await findings(mesh)
        assert len(faults["caches"]) == 3, faults
        ledger, events, served = faults["caches"]
        assert "its ledger is empty" in ledger
        assert "engine memory 0 kept" in events
        assert "dropped (block_size)" in events
        assert f"served {sum(cached):,} cached tokens that routers did not expect" in served
        [warning] = faults["warnings"]
        assert f"have blocks of {ODD} tokens, the model's are of 16" in warning
        return True

    await eventually(found, what="the findings of the doctor")
    shown = (await mesh.command("explain", answers[-1]["id"])).stdout
    assert f"{cached[-1]} of them were" in shown
    assert "served from a tier that announces nothing" in shown
    top = await mesh.command("top", "--once", "--json", "--view", "caches")
    [row] = json.loads(top.stdout)["rows"]
    assert (row["prompts"], row["served_tokens"]) == (10, sum(cached))
    assert (row["unexpected_tokens"], row["kept_blocks"]) == (sum(cached), [0, 0, 0, 0])
    assert "block_size" in row["dropped_blocks"]
    series = scrape(mesh.metrics_port)
    of = f'{{model="{MODEL}",tier="0",worker="sidecar"}}'
    assert series[f"kvmesh_frontend_served_cached_tokens_total{of}"] == sum(cached)
    assert series[f"kvmesh_frontend_expected_cached_tokens_total{of}"] == 0
    assert (await clear(mesh))["ok"]
    assert (await ask(mesh, 9))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("status", [401, 404])
async def test_a_server_that_refuses_its_worker_is_no_fault_of_the_client(
    mesh: Mesh, serve: Serve, status: int
) -> None:
    server = await serve("server")
    sidecar(mesh, "sidecar", server)
    await mesh.ready()
    server.status = status
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with client_session() as session:
        client = Client(mesh.url, session)
        refused, answer = await client.post("/v1/chat/completions", body)
        assert refused == 500, answer
        assert f"{server.url}/v1/completions replied {status}" in answer["error"]["message"]
        server.status = 200
        accepted, answer = await client.post("/v1/chat/completions", body)
        assert accepted == 200, answer


@pytest.mark.parametrize("style", ["vllm", "sglang"])
async def test_undecodable_messages_are_counted_and_cause_no_dump(
    mesh: Mesh, serve: Serve, style: str
) -> None:
    server = await serve("server", style)
    sidecar(mesh, "sidecar", server)
    await mesh.ready()
    for turn in range(4):
        await ask(mesh, turn)
    for number in range(50):
        await server.publisher.send_raw(b"\xc1" + bytes([number]))
    await ask(mesh, 4)

    async def found() -> bool:
        faults = await findings(mesh)
        [events] = faults["caches"]
        assert "50 messages malformed" in events
        assert "engine memory 0 kept" not in events
        [warning] = faults["warnings"]
        assert "cannot be decoded" in warning
        return faults.keys() == {"caches", "warnings"}

    await eventually(found, what="the findings of the doctor")
    log = (mesh.folder / "sidecar.log").read_text()
    assert log.count("malformed KV event") <= 2, log
    assert "messages of KV events are lost" not in log


async def test_the_answer_names_the_worker_and_the_tiers_that_are_left(
    mesh: Mesh, serve: Serve
) -> None:
    sidecar(mesh, "sound", await serve("sound"))
    sidecar(mesh, "closed", await serve("closed", development=False))
    await mesh.ready()
    await eventually(lambda: mesh.live_workers() == 2)
    for turn in range(6):
        await ask(mesh, turn)
    answer = await clear(mesh)
    left = {told["name"]: told["not_cleared"] for told in answer["instances"]}
    assert not answer["ok"]
    assert left["sound"] == []
    assert [each["tier"] for each in left["closed"]] == [0, 1, 2, 3]
    assert "VLLM_SERVER_DEV_MODE=1" in left["closed"][0]["reason"]
