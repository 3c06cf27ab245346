"""A real Prometheus finds data for every panel, recording rule and alert of a mesh under load."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.prometheus import NAME, PrometheusServer, panels, program, rules
from support.traffic import Traffic
from support.wait import eventually

PLANNER = {
    "KVMESH_PLANNER_CONNECTOR": "advisory",
    "KVMESH_PLANNER_POOLS": "workers:max=4",
    "KVMESH_PLANNER_TTFT": "p95=10s",
    "KVMESH_PLANNER_INTERVAL_S": "1",
}

pytestmark = pytest.mark.skipif(
    program("prometheus") is None, reason="no Prometheus: install Debian's package prometheus"
)


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path, {"KVMESH_MOCK_SPEEDUP": "5"})
    yield mesh
    mesh.stop()


def start(mesh: Mesh) -> dict[str, list[int]]:
    """Start one process of each kind and two workers; returns the ports of metrics by job."""
    more = {
        "kvbm": {
            "KVMESH_KVBM_DIRECTORY": str(mesh.folder / "node"),
            "KVMESH_KVBM_HOST_BYTES": str(16 << 20),
            "KVMESH_KVBM_DISK_PATH": str(mesh.folder / "disk"),
            "KVMESH_KVBM_DISK_BYTES": str(16 << 20),
        },
        "planner": PLANNER,
    }
    ports: dict[str, list[int]] = {}
    for role in ("indexer", "router", "kvbm", "planner"):
        ports[role] = [free_port()]
        port = {f"KVMESH_{role}_METRICS_PORT".upper(): str(ports[role][0])}
        mesh.start(role, f"{role}-0", **port, **more.get(role, {}))
    for number in range(2):
        mesh.start("worker", f"worker-{number}")
    mesh.start("frontend", "frontend-0")
    return {**ports, "worker": list(mesh.worker_ports.values()), "frontend": [mesh.metrics_port]}


async def test_every_query_of_boards_and_rules_returns_data(mesh: Mesh, tmp_path: Path) -> None:
    server = PrometheusServer(tmp_path, start(mesh))
    server.start()
    try:
        await mesh.ready()
        await eventually(server.ready, what="Prometheus is ready")
        selectors = {name for alert in rules("alert").values() for name in NAME.findall(alert)}
        waited = [*panels("15s").values(), *rules("record"), *sorted(selectors)]

        async def answered() -> list[str]:
            found = [await asyncio.to_thread(server.query, each) for each in waited]
            return [each for each, samples in zip(waited, found, strict=True) if not samples]

        async def complete() -> bool:
            waited[:] = await answered()
            return not waited

        async with Traffic(mesh.url, clients=4, tokens=8):
            try:
                await eventually(complete, timeout=60)
            except AssertionError:
                pytest.fail(f"queries without data: {waited}")
        for expression in (*rules("record").values(), *rules("alert").values()):
            await asyncio.to_thread(server.query, expression)  # parses
        assert not await asyncio.to_thread(server.query, 'ALERTS{alertstate="firing"}')
    finally:
        server.stop()
