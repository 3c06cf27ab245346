"""Ready means routable: from the first 200 of /health on requests are served, with the index."""

import asyncio
import json
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.frontend import client_session
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.streams.configuration import StreamLimits

LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)
ROLES = ("indexer", "router", "worker", "frontend")
LOGGED = {"worker": "serving kvmesh-demo", "frontend": "listening on"}
PROMPTS = range(8)


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    ports = {f"KVMESH_{role}_METRICS_PORT".upper(): str(free_port()) for role in ROLES[:2]}
    env = {"KVMESH_MOCK_SPEEDUP": "20", **ports, **stream_env(LIMITS)}
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


def health(mesh: Mesh, url: str = "") -> int:
    try:
        with urllib.request.urlopen(f"{url or mesh.url}/health", timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def url_of(mesh: Mesh, role: str) -> str:
    return f"http://127.0.0.1:{mesh.env[f'KVMESH_{role}_METRICS_PORT'.upper()]}"


def router(mesh: Mesh, path: str) -> str:
    with urllib.request.urlopen(url_of(mesh, "router") + path, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


async def cached_tokens(mesh: Mesh, client: aiohttp.ClientSession, number: int) -> int:
    """The cached tokens of a prompt; every second response is streamed."""
    body: dict[str, Any] = {
        "model": "kvmesh-demo",
        "messages": [{"role": "user", "content": f"{number} is what I count. " * 60}],
        "max_tokens": 4,
    }
    if number % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.post(f"{mesh.url}/v1/chat/completions", json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    assert "error" not in text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if "usage" in line]
    return int(json.loads(lines[-1])["usage"]["prompt_tokens_details"]["cached_tokens"])


async def all_cached_tokens(mesh: Mesh) -> list[int]:
    async with client_session() as client:
        return await asyncio.gather(*(cached_tokens(mesh, client, number) for number in PROMPTS))


async def start(mesh: Mesh, *roles: str) -> None:
    """Start one process of each role, in turn, each after the last one serves."""
    for role in roles:
        mesh.start(role, f"{role}-0")
        await serves(mesh, role)


async def serves(mesh: Mesh, role: str) -> None:
    def check() -> bool:
        if role in LOGGED:
            return LOGGED[role] in (mesh.folder / f"{role}-0.log").read_text()
        return health(mesh, url_of(mesh, role)) == 200

    await eventually(check, what=f"the {role} serves")


async def first_200(mesh: Mesh) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(health, mesh) != 200:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "order",
    [
        ("frontend", "router", "indexer", "worker"),
        ("frontend", "worker", "indexer", "router"),
        ("worker", "indexer", "router", "frontend"),
    ],
    ids=["worker last", "router last", "frontend last"],
)
async def test_at_the_first_200_requests_are_served_with_the_index(
    mesh: Mesh, order: tuple[str, ...]
) -> None:
    *before, last = order
    await start(mesh, *before)
    assert health(mesh) == (0 if last == "frontend" else 503)
    mesh.start(last, f"{last}-0")
    await first_200(mesh)
    assert await all_cached_tokens(mesh) == [0] * len(PROMPTS)
    metrics = router(mesh, "/metrics")
    assert 'kvmesh_router_index_failures_total{model="kvmesh-demo"} 0.0' in metrics
    assert 'kvmesh_router_decisions_total{model="kvmesh-demo",policy="kv"} 8.0' in metrics


async def test_without_an_indexer_requests_are_served_and_its_absence_is_reported(
    mesh: Mesh,
) -> None:
    await start(mesh, "frontend", "worker")
    mesh.start("router", "router-0")
    await first_200(mesh)
    await all_cached_tokens(mesh)
    words = "no reply from an indexer for kvmesh-demo"
    await eventually(lambda: words in router(mesh, "/health"))
    assert 'kvmesh_warnings{kind="no_index"} 1.0' in router(mesh, "/metrics")
    await start(mesh, "indexer")
    # even without requests
    await eventually(lambda: words not in router(mesh, "/health"))


@pytest.mark.parametrize("role", ["router", "frontend", "indexer"])
async def test_a_restarted_process_knows_the_cached_prefixes(mesh: Mesh, role: str) -> None:
    await start(mesh, "indexer", "router", "worker")
    mesh.start("worker", "worker-1")
    mesh.start("frontend", "frontend-0")
    await first_200(mesh)
    await all_cached_tokens(mesh)

    async def cached() -> bool:
        return min(await all_cached_tokens(mesh)) > 0

    await eventually(cached, what="the index knows the cached prompts")
    mesh.kill(f"{role}-0", signal.SIGTERM)
    if role != "indexer":
        await eventually(lambda: health(mesh) != 200)
    mesh.restart(f"{role}-0")
    if role == "indexer":
        await serves(mesh, role)
    await first_200(mesh)
    async with client_session() as client:  # one by one: under load, other workers may get them
        assert min([await cached_tokens(mesh, client, number) for number in PROMPTS]) > 0
    if role == "router":
        assert 'index_failures_total{model="kvmesh-demo"} 0.0' in router(mesh, "/metrics")
