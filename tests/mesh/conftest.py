"""Fixtures of the mesh tests: a NATS server per module and a namespace per test."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.kvbm_node import DISK_BYTES, HOST_BYTES, Node
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.up import Up
from support.weights import Agents
from support.worker import ScriptedFrontend, Workers

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    store: Path = tmp_path_factory.mktemp("nats")
    server = NatsServer(store)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def options(nats_server: NatsServer) -> BusOptions:
    return BusOptions(url=nats_server.url, namespace=f"t{secrets.token_hex(4)}")


@pytest.fixture
def lease_s() -> float:
    """Lease length that a busy machine can renew; tests of lapsing leases set a shorter one."""
    return 10.0


@pytest.fixture
def limits(lease_s: float) -> StreamLimits:
    sizes = {"kv_bytes": 256 << 20, "route_bytes": 64 << 20, "seq_bytes": 64 << 20}
    return StreamLimits(**sizes, lease_s=lease_s)


@pytest_asyncio.fixture
async def bus(options: BusOptions, limits: StreamLimits) -> AsyncIterator[Bus]:
    bus = await Bus.connect(options, "test")
    await ensure_streams(bus, limits)
    yield bus
    await bus.close()


@pytest_asyncio.fixture(loop_scope="module")
async def up_bus(up: Up) -> AsyncIterator[Bus]:
    """A connection to the mesh of the module's own fixture `up`, once that is ready."""
    await up.ready()
    bus = await Bus.connect(up.options, "test")
    yield bus
    await bus.close()


@pytest_asyncio.fixture(loop_scope="module")
async def directory(up_bus: Bus) -> AsyncIterator[Directory]:
    """All cards of that mesh."""
    directory = Directory(up_bus, StreamLimits())
    await directory.open()
    yield directory
    await directory.close()


@pytest_asyncio.fixture
async def agents(
    bus: Bus, limits: StreamLimits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agents]:
    """Weights processes, each as on a node of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    agents = Agents(bus, limits, tmp_path)
    yield agents
    await agents.close()


@pytest_asyncio.fixture
async def workers(bus: Bus, options: BusOptions, limits: StreamLimits) -> AsyncIterator[Workers]:
    workers = Workers(options, limits)
    yield workers
    for started in workers.started:
        await started.stop()


@pytest_asyncio.fixture
async def frontend(bus: Bus) -> AsyncIterator[ScriptedFrontend]:
    frontend = ScriptedFrontend(bus)
    await frontend.open()
    yield frontend
    await frontend.reader.close()


@pytest_asyncio.fixture
async def node(
    nats_server: NatsServer, bus: Bus, limits: StreamLimits, tmp_path: Path
) -> AsyncIterator[Node]:
    env = {
        "KVMESH_KVBM_DIRECTORY": str(tmp_path / "node"),
        "KVMESH_KVBM_HOST_BYTES": str(HOST_BYTES),
        "KVMESH_KVBM_DISK_PATH": str(tmp_path / "disk"),
        "KVMESH_KVBM_DISK_BYTES": str(DISK_BYTES),
        "KVMESH_KVBM_DISK_FREE_BYTES": "0",
        **stream_env(limits),
    }
    node = Node(Mesh(nats_server.url, tmp_path, env, bus.options.namespace), bus, limits)
    yield node
    for worker in node.workers:
        worker.close()
    node.mesh.stop()
