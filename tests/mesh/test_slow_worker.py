"""A worker ten times slower than the others is detected, reported and given less work."""

import asyncio
import json
import urllib.request
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio
from support.frontend import client_session
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

WORKERS = 4
BATCH = 24
LATEST = 3  # batches
SLOW = "worker-0"


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path, {"KVMESH_MOCK_SPEEDUP": "2"})
    yield mesh
    mesh.stop()


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


async def serving_worker(mesh: Mesh, client: aiohttp.ClientSession, number: int) -> str:
    """The worker that served a unique prompt; every second response is streamed."""
    body = {
        "model": "kvmesh-demo",
        "messages": [{"role": "user", "content": f"{number} is what I count. " * 60}],
        "max_tokens": 24,
        "stream": bool(number % 2),
        "nvext": {"extra_fields": ["worker_id"]},
    }
    async with client.post(f"{mesh.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        text = await answer.text()
    return next(f"worker-{n}" for n in range(WORKERS) if f"worker-{n}-" in text)


async def status(mesh: Mesh) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((await mesh.command("status", "--json")).stdout)
    return report


async def test_a_slow_worker_is_reported_and_gets_a_share_by_its_speed(mesh: Mesh) -> None:
    port = free_port()
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0", KVMESH_ROUTER_METRICS_PORT=str(port))
    slow = {"KVMESH_MOCK_SLOW_STEP": "1", "KVMESH_MOCK_SLOW_FACTOR": "10"}
    for number in range(WORKERS):
        name = f"worker-{number}"
        mesh.start("worker", name, **(slow if name == SLOW else {}))
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    await eventually(lambda: joined(mesh), what="all workers have joined")
    sent = 0

    async with client_session() as client:

        async def batch() -> Counter[str]:
            nonlocal sent
            numbers, sent = range(sent, sent + BATCH), sent + BATCH
            return Counter(
                await asyncio.gather(*(serving_worker(mesh, client, n) for n in numbers))
            )

        while f"{SLOW} rank 0 takes" not in get(port, "/health"):
            assert sent < 40 * BATCH, mesh.logs()
            await batch()
        fair = LATEST * BATCH / (10 * (WORKERS - 1) + 1)
        latest = deque([await batch() for _ in range(LATEST)], maxlen=LATEST)
        while sum(found[SLOW] for found in latest) > 3 * fair:
            assert sent < 80 * BATCH, latest
            latest.append(await batch())
    assert f'kvmesh_router_slowness{{model="kvmesh-demo",rank="0",worker="{SLOW}"}}' in get(
        port, "/metrics"
    )
    report = await status(mesh)
    assert any(f"{SLOW} rank 0 takes" in warned["text"] for warned in report["warnings"])
    assert " since " in next(w["text"] for w in report["warnings"] if SLOW in w["text"])
    speeds = {m["card"]["name"]: m["speed"][0] for m in report["instances"] if m["speed"]}
    assert (
        speeds[SLOW]["speed"] < 0.5 < min(speeds[f"worker-{n}"]["speed"] for n in range(1, WORKERS))
    )
    assert speeds[SLOW]["since"] is not None
    metric = f'kvmesh_router_rank_speed{{model="kvmesh-demo",rank="0",worker="{SLOW}"}} 0.'
    assert metric in get(port, "/metrics")
    steps = {m["card"]["name"]: m["load"][0]["step_s"] for m in report["instances"] if m["load"]}
    others = [steps[f"worker-{n}"] for n in range(1, WORKERS)]
    assert steps[SLOW] > 3 * max(others)


async def joined(mesh: Mesh) -> bool:
    roles = [member["card"]["role"] for member in (await status(mesh))["instances"]]
    return roles.count("worker") == WORKERS
