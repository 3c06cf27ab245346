"""A mesh on a cluster of servers, in operator mode, as `kvmesh secure` writes it."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mesh import Mesh
from support.secured import SecuredCluster
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import StreamInfo
from kvmesh.bus.errors import BusError
from kvmesh.bus.streams.configuration import ensure_streams

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    cluster = SecuredCluster(folder, "--jwt", "--expire-days", "2", "--workers", "worker-0")
    cluster.start()
    yield cluster
    cluster.stop()


async def copies(bus: Bus, stream: str) -> int:
    """The current copies of a stream; 0 while it has no leader."""
    info: StreamInfo = await bus.js.stream_info(stream)
    others = (info.cluster.replicas or []) if info.cluster is not None else []
    return 1 + sum(bool(other.current) for other in others)


def complete(mesh: Mesh, prompt: str) -> int:
    """The number of tokens of an answer."""
    body = {
        "model": "kvmesh-demo",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": prompt}],
        "nvext": {"ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{mesh.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


async def test_the_mesh_serves_and_outlives_a_server(
    cluster: SecuredCluster, tmp_path: Path
) -> None:
    mesh = Mesh("", tmp_path, {"KVMESH_MOCK_SPEEDUP": "20"}, namespace="kvmesh")
    async with cluster.connected("operator") as bus:

        async def made() -> bool:
            try:
                await ensure_streams(bus)
                return await copies(bus, bus.subjects.kv_stream) == 3
            except BusError:  # the servers elect
                return False

        await eventually(made, what="three copies of each stream")
        try:
            mesh.start("indexer", "indexer-0", **cluster.env("indexer"))
            mesh.start("router", "router-0", **cluster.env("router"))
            mesh.start("worker", "worker-0", **cluster.env("worker.worker-0"))
            mesh.start("frontend", "frontend-0", **cluster.env("frontend"))
            await mesh.ready()
            assert await asyncio.to_thread(complete, mesh, "Explain this.") == 5
            cluster.servers[0].kill()
            await mesh.ready()
            assert await asyncio.to_thread(complete, mesh, "Explain that.") == 5
            assert "violation" not in mesh.logs().lower()
            assert "does not permit" not in mesh.logs()
        finally:
            mesh.stop()
