"""Servers that stop, and a cluster that has not started yet, as one connection sees them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.nats_cluster import Cluster
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.connection import lame_duck
from kvmesh.bus.discovery.ping import answer_pings, ping
from kvmesh.cli.supervisor.mesh_view import MeshView
from kvmesh.settings.schema import NatsSettings, Settings, StreamSettings

LOST = "lost the connection"
SETTINGS = StreamSettings(
    kv_bytes=1 << 20, route_bytes=1 << 20, seq_bytes=1 << 20, scaling_bytes=1 << 20
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.stop()


@pytest_asyncio.fixture
async def peers(cluster: Cluster) -> AsyncIterator[list[Bus]]:
    """Two connections: of a process that replies to pings, and of one that sends them."""
    await asyncio.to_thread(cluster.start)
    options = BusOptions(url=cluster.url, namespace="t")
    peers = [await Bus.connect(options, name) for name in ("replies", "asks")]
    await answer_pings(peers[0], "w-1")
    yield peers
    for bus in peers:
        await bus.close()


async def test_a_process_leaves_a_server_before_it_stops(
    cluster: Cluster,
    peers: list[Bus],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lame_duck, "SPREAD_S", 0.5)
    caplog.set_level(logging.INFO)
    replies, asks = peers
    for member in [m for m in cluster.members if m.url.endswith(replies.server)]:
        stopping = asyncio.create_task(asyncio.to_thread(member.leave))
        while not stopping.done():
            await ping(asks, "w-1", timeout=10.0)
        await stopping
        assert replies.counts.reconnects == 1
    assert "is about to stop" in caplog.text
    assert LOST not in caplog.text


async def test_without_another_server_a_process_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lame_duck, "SPREAD_S", 0.0)
    caplog.set_level(logging.INFO)
    server = NatsServer(tmp_path)
    server.settings = 'lame_duck_duration: "30s", lame_duck_grace_period: "1s"'
    server.start()
    bus = await Bus.connect(BusOptions(url=server.url), "test")
    await answer_pings(bus, "w-1")
    stopping = asyncio.create_task(asyncio.to_thread(server.leave))
    await eventually(lambda: "is about to stop" in caplog.text)
    await ping(bus, "w-1", timeout=10.0)
    assert LOST not in caplog.text
    await stopping
    await asyncio.to_thread(server.start)
    await ping(bus, "w-1", timeout=10.0)
    assert caplog.text.count("is about to stop") == 1
    await bus.close()
    server.stop()


async def test_up_waits_for_a_cluster_that_has_no_leader_yet(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(cluster.start)
    first, second, third = cluster.members
    for member in (second, third):
        member.kill()
    settings = Settings(nats=NatsSettings(url=first.url, replicas=3), streams=SETTINGS)
    view = await MeshView.connect(settings, once=True)
    following = asyncio.create_task(view.follow())
    await eventually(lambda: "JetStream is not ready yet" in caplog.text)
    assert view.waits_for == "JetStream"
    for member in (second, third):
        await asyncio.to_thread(member.start)
    await following
    assert not view.waits_for
    await view.close()


async def test_processes_stop_cleanly_without_a_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    mesh = Mesh(server.url, tmp_path)
    mesh.start_all(workers=1)
    await mesh.ready()
    server.kill()
    for process in mesh.processes.values():
        process.terminate()
    for name, process in mesh.processes.items():
        assert process.wait(60) == 0, name
    assert "Traceback" not in mesh.logs()


async def test_the_buckets_of_requests_exist_before_the_first_request(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    mesh = Mesh(nats_server.url, tmp_path)
    mesh.start("frontend", "frontend-0")
    bus = await Bus.connect(mesh.options, "test")
    names = bus.subjects
    wanted = {
        f"KV_{bucket}"
        for bucket in (
            *(names.pins_bucket, names.responses_bucket, names.answers_bucket),
            *(names.secrets_bucket, names.keys_bucket, names.catalog_bucket),
        )
    }

    async def made() -> bool:
        infos = await bus.js.streams_info()
        return wanted <= {info.config.name for info in infos}

    await eventually(made, what="the buckets exist")
    mesh.stop()
    await bus.close()
