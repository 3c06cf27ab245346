"""Workers that differ from their model's others: refused at the start, excluded if they join."""

import asyncio
import json
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.frontend import client_session, scripted_worker
from support.mesh import Mesh, stream_env
from support.nats import NatsServer, free_port
from support.tiny import tiny_model
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.demo import model_dir
from kvmesh.hashing import HASH_VERSION

LIMITS = StreamLimits(kv_bytes=64 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=5.0)
CONTEXT = "2048"
HOPELESS = 2


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "20", "KVMESH_WORKER_CONTEXT": CONTEXT, **stream_env(LIMITS)}
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """The demo model with another tokenizer, in a folder of the same name."""
    folder = tmp_path / "other" / "kvmesh-demo"
    shutil.copytree(model_dir(), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|unlike|>"
    file.write_text(json.dumps(tokenizer))
    return folder


def log(mesh: Mesh, name: str) -> str:
    return (mesh.folder / f"{name}.log").read_text()


async def ended(mesh: Mesh, name: str) -> int:
    return await asyncio.to_thread(mesh.processes.pop(name).wait, PATIENCE_S)


async def status(mesh: Mesh) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((await mesh.command("status", "--json")).stdout)
    return report


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "worker-1: tokenizer "),
        ({"KVMESH_WORKER_CONTEXT": "1024"}, "worker-1: context 1024 differs from 2048 of worker-0"),
        ({"KVMESH_WORKER_BLOCK_SIZE": "32"}, "worker-1: block size 32 differs from 16 of worker-0"),
        ({"KVMESH_WORKER_REVISION": "v2"}, "worker-1: model revision v2 differs from v1"),
    ],
    ids=["tokenizer", "context", "block size", "revision"],
)
async def test_a_differing_worker_is_refused_in_one_line_and_not_restarted(
    mesh: Mesh, other_model: Path, env: dict[str, str], words: str
) -> None:
    mesh.start("worker", "worker-0", KVMESH_WORKER_REVISION="v1")
    await eventually(lambda: "serving kvmesh-demo" in log(mesh, "worker-0"))
    env = env or {"KVMESH_WORKER_MODEL": str(other_model)}
    mesh.start("worker", "worker-1", **{"KVMESH_WORKER_REVISION": "v1", **env})
    await refused(mesh, words)


async def test_a_worker_with_other_hashing_is_refused(mesh: Mesh) -> None:
    """A worker of another release hashes differently."""
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    async with scripted_worker(bus, LIMITS, "old", hash_version=77):
        mesh.start("worker", "worker-1")
        await refused(mesh, f"worker-1: hash version {HASH_VERSION} differs from 77 of old")
    await bus.close()


async def test_a_worker_of_another_kv_layout_is_refused(mesh: Mesh) -> None:
    pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
    torch = {
        "KVMESH_WORKER_ENGINE": "torch",
        "KVMESH_WORKER_MODEL": str(tiny_model()),
        "KVMESH_WORKER_SERVED_NAME": "kvmesh-demo",
        "KVMESH_TORCH_THREADS": "1",
        "KVMESH_TORCH_BLOCKS": "256",
    }
    mesh.start("worker", "worker-0", **torch)
    await eventually(lambda: "serving kvmesh-demo" in log(mesh, "worker-0"))
    mesh.start("worker", "worker-1", **torch, KVMESH_TORCH_DTYPE="bfloat16")
    refusal = await refused(mesh, "worker-1: KV layout ")
    assert re.search(r"KV layout bfloat16 .* differs from float32 .* of worker-0", refusal)


async def refused(mesh: Mesh, words: str) -> str:
    """The one line in which `worker-1` reports its refusal."""
    assert await ended(mesh, "worker-1") == HOPELESS
    (refusal,) = [line for line in log(mesh, "worker-1").splitlines() if words in line]
    assert "(kvmesh-demo)" in refusal
    assert "worker.served_name" in refusal
    assert "Traceback" not in log(mesh, "worker-1")
    return refusal


async def test_the_lease_of_a_dead_worker_excludes_no_worker(mesh: Mesh, other_model: Path) -> None:
    mesh.start("worker", "worker-0")
    await eventually(lambda: "serving kvmesh-demo" in log(mesh, "worker-0"))
    mesh.kill("worker-0", signal.SIGKILL)
    mesh.start("worker", "worker-1", KVMESH_WORKER_MODEL=str(other_model))
    await eventually(lambda: "serving kvmesh-demo" in log(mesh, "worker-1"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_differing_worker_that_joins_gets_no_work_and_is_reported(
    mesh: Mesh, stream: bool
) -> None:
    """As a worker of a release without the check, or one that joined at the same instant."""
    port = free_port()
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0", KVMESH_ROUTER_METRICS_PORT=str(port))
    mesh.start("worker", "worker-0")
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    bus = await Bus.connect(mesh.options, "test")
    card: dict[str, Any] = {"started": time.time(), "tokenizer": "0123", "context": 512}
    async with scripted_worker(bus, LIMITS, "odd", **card) as odd:
        await eventually(lambda: "odd" in get(port, "/health"), what="the router warns")
        body = {"model": "kvmesh-demo", "max_tokens": 4, "stream": stream}
        async with client_session() as client:
            for number in range(12):
                messages = [{"role": "user", "content": f"{number} says hello"}]
                url = f"{mesh.url}/v1/chat/completions"
                async with client.post(url, json={**body, "messages": messages}) as answer:
                    assert answer.status == 200
                    await answer.read()
        assert odd.works == []
        (model,) = json.loads(get(mesh.port, "/v1/models"))["data"]
        assert model["max_model_len"] == int(CONTEXT)
        assert 'kvmesh_warnings{kind="misfit"} 1.0' in get(port, "/metrics")
        report = await status(mesh)
        members = {member["card"]["name"]: member for member in report["instances"]}
        assert (members["odd"]["eligible"], members["worker-0"]["eligible"]) == (False, True)
        assert "odd: tokenizer 0123 differs from" in members["odd"]["reason"]
        assert any("odd: tokenizer" in warned["text"] for warned in report["warnings"])
    await bus.close()


async def test_two_live_workers_of_one_name_both_report_it(mesh: Mesh) -> None:
    ports = [free_port(), free_port()]
    mesh.start("worker", "worker-0", KVMESH_WORKER_METRICS_PORT=str(ports[0]))
    await eventually(lambda: "serving kvmesh-demo" in log(mesh, "worker-0"))
    first = mesh.processes.pop("worker-0")
    mesh.start("worker", "worker-0", KVMESH_WORKER_METRICS_PORT=str(ports[1]))
    mesh.processes["first"] = first
    await eventually(lambda: all("is named worker-0 as" in get(p, "/health") for p in ports))
    report = await status(mesh)
    assert sum("has the same name" in warned["text"] for warned in report["warnings"]) == 2
