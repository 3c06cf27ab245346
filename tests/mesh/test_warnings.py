"""Faults of a serving mesh are reported: on /health, in `kvmesh status`, in metrics."""

import asyncio
import hashlib
import itertools
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.frontend import client_session, scripted_router, scripted_worker
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Chunk
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.frontend.generation.cache_expectations import MIN_REQUESTS

LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)
CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "20", **stream_env(LIMITS)}
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


def get(port: int, path: str, headers: dict[str, str] | None = None) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers or {})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


async def status(mesh: Mesh, *flags: str) -> str:
    return (await mesh.command("status", *flags)).stdout


def body(number: int, stream: bool, words: int = 300) -> dict[str, Any]:
    content = f"{number} is a number. " * words
    messages = [{"role": "user", "content": content}]
    return {"model": "kvmesh-demo", "max_tokens": 4, "stream": stream, "messages": messages}


async def eventually_reported(mesh: Mesh, port: int, kind: str, text: str) -> None:
    """Wait for the warning on /health, in its metric, and in both forms of `status`."""
    await eventually(lambda: text in warnings(get(port, "/health")), what=f"/health says {text}")
    assert f'kvmesh_warnings{{kind="{kind}"}} 1.0' in get(port, "/metrics")

    async def in_status() -> bool:
        report = json.loads(await status(mesh, "--json"))
        return text in [warned["text"] for warned in report["warnings"]]

    await eventually(in_status, what=f"kvmesh status says {text}")
    assert text in await status(mesh)


def warnings(health: str) -> list[str]:
    found: list[str] = json.loads(health).get("warnings", [])
    return found


async def test_a_worker_without_events_and_an_index_without_its_blocks_are_reported(
    mesh: Mesh,
) -> None:
    ports = {"worker": free_port(), "indexer": free_port()}
    mesh.start("indexer", "indexer-0", KVMESH_INDEXER_METRICS_PORT=str(ports["indexer"]))
    mesh.start("router", "router-0")
    worker = {"KVMESH_MOCK_LOSE_EVERY": "1", "KVMESH_WORKER_METRICS_PORT": str(ports["worker"])}
    mesh.start("worker", "worker-0", **worker)
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    assert json.loads(get(ports["worker"], "/health")) == {"status": "ok"}
    silent = "worker-0 rank 0 computes prompts and publishes no KV events: the index does not know"
    numbers = itertools.count()

    async def reported() -> bool:
        """Send one more request: the dump that the indexer has requested is an event."""
        number = next(numbers)
        leaves = bool(number % 2)
        request_body = body(number, stream=leaves) | ({"max_tokens": 1000} if leaves else {})
        async with client.post(mesh.url + CHAT, json=request_body) as answer:
            assert answer.status == 200
            await (answer.content.readline() if leaves else answer.read())
        return f"{silent} what it holds" in warnings(get(ports["worker"], "/health"))

    async with client_session() as client:
        await eventually(reported)
    short = f"the index has less than half of the blocks that rank 0 of {await instance(mesh)}"
    await eventually_reported(mesh, ports["worker"], "no_kv_events", f"{silent} what it holds")
    await eventually_reported(mesh, ports["indexer"], "index_short", f"{short} reports as cached")
    assert json.loads(get(ports["worker"], "/health"))["status"] == "ok"
    aborted = 'kvmesh_worker_aborted_requests_total{model="kvmesh-demo",rank="0",worker="worker-0"}'
    shown = get(ports["worker"], "/metrics")
    assert aborted in shown
    assert f"{aborted} 0.0" not in shown


async def test_a_router_reports_an_index_without_the_workers_blocks(mesh: Mesh) -> None:
    port = free_port()
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0", KVMESH_ROUTER_METRICS_PORT=str(port))
    mesh.start("worker", "worker-0", KVMESH_MOCK_LOSE_EVERY="1")
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    # a dump after the first request would tell the index of its blocks
    await eventually(lambda: "requested a dump of rank 0 of worker-0" in mesh.logs())
    words = (
        "the index has no overlaps for prompts of kvmesh-demo that begin like earlier ones:"
        " KV events are lost, disabled, or hashed with another block size or salt"
    )

    async def reported() -> bool:
        """Send one more of the requests with the common prefix."""
        async with client.post(mesh.url + CHAT, json=body(1, stream=True)) as answer:
            assert answer.status == 200
            await answer.read()
        return words in warnings(get(port, "/health"))

    async with client_session() as client:
        assert not await reported()
        await eventually(reported)
    assert json.loads(get(port, "/health"))["status"] == "ok"
    await eventually_reported(mesh, port, "empty_index", words)


async def instance(mesh: Mesh) -> str:
    report = json.loads(await status(mesh, "--json"))
    cards = [member["card"] for member in report["instances"]]
    return next(str(card["instance"]) for card in cards if card["name"] == "worker-0")


MISSED = (
    "a finds less than half of the cached tokens that routers expect there: the index or the"
    " predictions are wrong about it"
)


@asynccontextmanager
async def missed_expectations(
    mesh: Mesh, stream: bool, headers: dict[str, str] | None = None
) -> AsyncIterator[None]:
    """Send requests to a worker that finds none of the prefixes that routers expected."""
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    async with scripted_router(bus, LIMITS) as router, scripted_worker(bus, LIMITS, "a") as a:
        router.order, router.overlap = [a.instance], [2, 0, 0, 0]
        await mesh.ready()
        async with client_session() as client:
            for number in range(MIN_REQUESTS):
                request_body = body(number, stream, words=20)
                pending = asyncio.ensure_future(
                    client.post(mesh.url + CHAT, json=request_body, headers=headers)
                )
                work = await a.work(number)
                chunk = Chunk(work.request, 0, [300], finish="stop", cached=[0])
                await a.send(work, chunk)
                async with await pending as answer:
                    await answer.read()
        yield
    await bus.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_frontend_reports_a_worker_with_fewer_hits_than_predicted(
    mesh: Mesh, stream: bool
) -> None:
    mesh.start("frontend", "frontend-0")
    async with missed_expectations(mesh, stream):
        await eventually_reported(mesh, mesh.port, "missed_hits", MISSED)


async def test_with_keys_only_administrators_see_warnings_on_the_public_port(
    mesh: Mesh, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(key("plain", "[]") + key("admin", '["admin"]'))
    mesh.start("frontend", "frontend-0", KVMESH_FRONTEND_KEYS_FILE=str(keys))
    async with missed_expectations(mesh, False, {"x-api-key": "plain"}):
        await eventually_reported(mesh, mesh.metrics_port, "missed_hits", MISSED)
        for stranger in ({}, {"x-api-key": "wrong"}, {"x-api-key": "plain"}):
            assert json.loads(get(mesh.port, "/health", stranger)) == {"status": "healthy"}
        assert MISSED in warnings(get(mesh.port, "/health", {"x-api-key": "admin"}))


def key(name: str, scopes: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'[[key]]\nname = "{name}"\nsha256 = "{digest}"\nscopes = {scopes}\n'
