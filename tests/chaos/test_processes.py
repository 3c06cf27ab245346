"""Any one process is killed under load: the mesh recovers and answers every request in full."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.traffic import Traffic, distinct_prompts
from support.wait import eventually

CLIENTS = 8
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


@asynccontextmanager
async def traffic_of(mesh: Mesh) -> AsyncIterator[Traffic]:
    """Eight running clients."""
    async with Traffic(mesh.url, distinct_prompts(2, CLIENTS), CLIENTS, TOKENS) as traffic:
        await traffic.wait_for_outputs(16)
        yield traffic


async def test_a_killed_worker_costs_no_request(mesh: Mesh) -> None:
    async with traffic_of(mesh) as traffic:
        mesh.kill("worker-1")
        await traffic.wait_for_outputs(16)
        mesh.restart("worker-1")
        await eventually(lambda: mesh.live_workers() == WORKERS)
        await traffic.wait_for_outputs(16)
    assert traffic.failed == []


async def test_a_killed_router_is_replaced(mesh: Mesh) -> None:
    async with traffic_of(mesh) as traffic:
        mesh.kill("router-0")
        mesh.restart("router-0")
        await traffic.wait_for_outputs(16)
    assert traffic.failed == []


async def test_a_killed_indexer_is_replaced(mesh: Mesh) -> None:
    async with traffic_of(mesh) as traffic:
        mesh.kill("indexer-0")
        await traffic.wait_for_outputs(16)
        mesh.restart("indexer-0")
        await traffic.wait_for_outputs(16)
    assert traffic.failed == []


async def test_a_killed_frontend_is_replaced(mesh: Mesh) -> None:
    async with traffic_of(mesh) as traffic:
        mesh.kill("frontend-0")
        mesh.restart("frontend-0")
        await mesh.ready()
        await traffic.wait_for_outputs(16)
        failed = len(traffic.failed)
        await traffic.wait_for_outputs(16)
    assert len(traffic.failed) == failed  # only requests in flight or during the outage
    await eventually(lambda: mesh.metric("kvmesh_worker_running_requests") == 0)


async def test_a_restarted_bus_is_rejoined(nats_server: NatsServer, mesh: Mesh) -> None:
    async with traffic_of(mesh) as traffic:
        await asyncio.to_thread(nats_server.restart)
        await traffic.wait_for_outputs(32)
        failed = len(traffic.failed)
        await traffic.wait_for_outputs(32)
    assert len(traffic.failed) == failed
