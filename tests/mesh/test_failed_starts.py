"""`kvmesh status` says why a worker's start has failed, until a worker of that name joins."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import PATIENCE_S, eventually

from kvmesh.demo import model_dir

REFUSED = {"KVMESH_MOCK_KVBM": "true", "KVMESH_MOCK_HOST_BLOCKS": "4"}


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path)
    yield mesh
    mesh.stop()


async def fails(mesh: Mesh, name: str, **env: str) -> int:
    """The exit status of a worker that does not start."""
    mesh.start("worker", name, **env)
    return mesh.processes.pop(name).wait(PATIENCE_S)


async def failed(mesh: Mesh) -> dict[str, dict[str, Any]]:
    report = json.loads((await mesh.command("status", "--json")).stdout)
    starts = [each["start"] for each in report["failed_starts"]]
    return {start["instance"].rpartition("-")[0]: start for start in starts}


async def test_a_failed_start_is_shown_until_the_worker_joins(mesh: Mesh) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    assert await fails(mesh, "worker-0", **REFUSED) == 2
    assert await fails(mesh, "worker-0", **REFUSED) == 2  # it takes the place of the first one
    remote = {"KVMESH_WORKER_ENGINE": "openai", "KVMESH_REMOTE_URL": gone}
    remote["KVMESH_WORKER_MODEL"] = str(model_dir())
    assert await fails(mesh, "a.b", **remote) == 1
    found = await failed(mesh)
    assert set(found) == {"worker-0", "a.b"}
    first, other = found["worker-0"], found["a.b"]
    assert (first["engine"], first["phase"], first["final"]) == ("mock", "configuration", True)
    assert "mock.kvbm excludes" in first["error"]
    assert (other["phase"], other["final"]) == ("engine", False)
    assert gone in other["error"]
    text = (await mesh.command("status")).stdout
    assert "in configuration of mock; it rejects its settings: mock.kvbm excludes" in text
    assert "cannot use http" in text.partition("Failed starts:")[2]
    mesh.start("worker", "worker-0")

    async def joined() -> bool:
        return set(await failed(mesh)) == {"a.b"}

    await eventually(joined, what="the failed start is forgotten")
    mesh.kill("worker-0")
    assert set(await failed(mesh)) == {"a.b"}, "the worker did start"
