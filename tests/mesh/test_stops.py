"""Processes that are told to stop end with status 0, whatever has stopped or is frozen by then."""

import asyncio
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.forks import WHOLE_END
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

ROLES = ("indexer", "router", "kvbm", "worker", "planner", "frontend", "dashboard")
WORSE = ("Traceback", "leaked", "Exception ignored", "never retrieved", "was destroyed", "awaited")
NATS = "nats"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    (store := tmp_path / "nats").mkdir()
    server = NatsServer(store)
    server.start()
    yield server
    server.signal(signal.SIGCONT)
    server.stop()


@pytest_asyncio.fixture
async def mesh(server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    """All roles, whose interpreters end: only then do they report leaks."""
    env = {
        WHOLE_END: "1",
        "KVMESH_KVBM_DIRECTORY": str(tmp_path / "blocks"),
        "KVMESH_KVBM_HOST_BYTES": str(32 << 20),
        "KVMESH_DASHBOARD_PORT": str(free_port()),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    mesh = Mesh(server.url, tmp_path, env)
    yield mesh
    mesh.stop()


def start(mesh: Mesh) -> None:
    for role in ROLES:
        ports = {} if role in ("worker", "dashboard") else {metrics(role): str(free_port())}
        if role == "frontend":
            ports = {metrics(role): str(mesh.metrics_port)}
        mesh.start(role, f"{role}-0", **ports)


def metrics(role: str) -> str:
    return f"KVMESH_{role.upper()}_METRICS_PORT"


async def stop(mesh: Mesh, role: str) -> None:
    process = mesh.processes[f"{role}-0"]
    process.terminate()
    try:
        status = await asyncio.to_thread(process.wait, PATIENCE_S)
    except subprocess.TimeoutExpired:
        status = None
    assert (role, status) == (role, 0), mesh.logs()


def said(mesh: Mesh, role: str, text: str) -> bool:
    return text in (mesh.folder / f"{role}-0.log").read_text()


def told_nothing_worse(mesh: Mesh) -> None:
    logs = mesh.logs()
    assert [word for word in WORSE if word in logs] == [], logs


@pytest.mark.parametrize("first", [NATS, "frozen", "router", "frontend", "kvbm", "worker"])
async def test_any_order_of_stopping_is_clean(mesh: Mesh, server: NatsServer, first: str) -> None:
    start(mesh)
    await mesh.ready()
    await eventually(partial(said, mesh, "dashboard", "page at"))
    order = [role for role in (*ROLES, NATS) if role != first]
    random.Random(first).shuffle(order)
    if first == "frozen":
        server.signal(signal.SIGSTOP)
        order.remove(NATS)
    else:
        order.insert(0, first)
    for role in order:
        if role == NATS:
            server.stop()
        else:
            await stop(mesh, role)
    told_nothing_worse(mesh)
    if NATS in order:
        server.start()  # for the fixture


async def test_a_process_that_waits_for_nats_stops(mesh: Mesh, server: NatsServer) -> None:
    server.stop()
    start(mesh)
    for role in ROLES:
        await eventually(partial(said, mesh, role, "no NATS server at"))
        await stop(mesh, role)
    told_nothing_worse(mesh)
    server.start()


async def test_a_process_that_waits_for_jetstream_stops(mesh: Mesh, server: NatsServer) -> None:
    start(mesh)
    await mesh.ready()
    for role in ROLES:
        mesh.kill(f"{role}-0")
    server.kill(signal.SIGTERM)
    server.jetstream = None
    server.settings = 'server_name: x\ncluster { name: c, listen: "127.0.0.1:-1" }'
    server.start()
    for role in ROLES:
        mesh.restart(f"{role}-0")
    for role in ROLES:
        await eventually(partial(said, mesh, role, "is not ready yet"))
        await stop(mesh, role)
    told_nothing_worse(mesh)
