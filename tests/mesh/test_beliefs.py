"""What is wrong while the mesh serves on is named: on /health, in `kvmesh status`, in metrics."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
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
from kvmesh.bus.streams import StreamLimits, ensure_streams
from kvmesh.frontend.expectations import ENOUGH
from kvmesh.worker.silence import REQUESTS

LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)
CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "20", **stream_env(LIMITS)}
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


async def status(mesh: Mesh, *flags: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli.main", "status", *flags),
        *("--nats", mesh.nats_url, "--nats-namespace", mesh.namespace),
        stdout=subprocess.PIPE,
    )
    return (await process.communicate())[0].decode()


def body(number: int, stream: bool, words: int = 300) -> dict[str, Any]:
    content = f"{number} is a number. " * words
    messages = [{"role": "user", "content": content}]
    return {"model": "kvmesh-demo", "max_tokens": 4, "stream": stream, "messages": messages}


async def test_a_worker_without_events_and_an_index_without_its_blocks_are_named(
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
    async with client_session() as client:
        for number in range(2 * REQUESTS):
            async with client.post(mesh.url + CHAT, json=body(number, bool(number % 2))) as answer:
                assert answer.status == 200
                await answer.read()
    silent, short = "publishes no KV events", "the index knows less than half"
    await eventually(lambda: silent in get(ports["worker"], "/health"))
    await eventually(lambda: short in get(ports["indexer"], "/health"))
    assert json.loads(get(ports["worker"], "/health"))["status"] == "ok"
    assert 'kvmesh_warnings{kind="no_kv_events"} 1.0' in get(ports["worker"], "/metrics")
    assert 'kvmesh_warnings{kind="index_short"} 1.0' in get(ports["indexer"], "/metrics")
    await eventually(lambda: on_cards(mesh, silent, short), what="kvmesh status names both")
    assert f"worker-0 rank 0 computes prompts and {silent}" in await status(mesh)


async def on_cards(mesh: Mesh, *parts: str) -> bool:
    report = json.loads(await status(mesh, "--json"))
    texts = [warned["text"] for warned in report["warnings"]]
    return all(any(part in text for text in texts) for part in parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_frontend_names_a_worker_where_predicted_hits_do_not_come_true(
    mesh: Mesh, stream: bool
) -> None:
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    mesh.start("frontend", "frontend-0")
    async with scripted_router(bus, LIMITS) as router, scripted_worker(bus, LIMITS, "a") as a:
        router.order, router.overlap = [a.instance], [2, 0, 0, 0]
        await mesh.ready()
        async with client_session() as client:
            for number in range(ENOUGH):
                asked = body(number, stream, words=20)
                asking = asyncio.ensure_future(client.post(mesh.url + CHAT, json=asked))
                work = await a.work(number)
                chunk = Chunk(work.request, 0, [300], finish="stop", cached=[0])
                await a.send(work, chunk)
                async with await asking as answer:
                    await answer.read()
        words = "a finds less than half of the cached tokens that routers expect there"
        await eventually(lambda: words in get(mesh.port, "/health"))
        assert 'kvmesh_warnings{kind="missed_hits"} 1.0' in get(mesh.port, "/metrics")
        await eventually(lambda: on_cards(mesh, words), what="kvmesh status names it")
    await bus.close()
