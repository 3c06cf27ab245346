"""A kvbm loads the blocks of a vLLM's session back into memory before the session returns."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mesh import Mesh, scrape
from support.nats import NatsServer, free_port
from support.vllm import SIZE
from support.wait import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
START_S = 400
TEXT = "The agent has read this file and waits for its tests. " * 60


class Node:
    """A mesh of one vLLM with a kvbm that has a disk."""

    def __init__(self, mesh: Mesh, port: int) -> None:
        self.mesh = mesh
        self.port = port

    def metric(self, name: str, labels: str = "") -> float:
        """The sum of a metric of the kvbm over the samples with these labels."""
        found = scrape(self.port).items()
        start = f"kvmesh_kvbm_{name}"
        return sum(v for k, v in found if k.partition("{")[0] == start and labels in k)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json", "x-kvmesh-session-id": "agent"}
        request = urllib.request.Request(
            f"{self.mesh.url}{path}", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return dict(json.load(answer))

    def complete(self, **fields: object) -> dict[str, Any]:
        body = {"model": "slow", "prompt": TEXT, "max_tokens": 4, "temperature": 0, **fields}
        return self.post("/v1/completions", body)

    async def complete_before_a_tool(self) -> dict[str, Any]:
        """A turn while which a tool is reported that ends in half a minute."""
        turn = asyncio.to_thread(self.complete, max_tokens=60, ignore_eos=True)
        answer = asyncio.create_task(turn)
        event = {"event": "started", "tool": "Bash", "remaining_s": 30.0}
        while not answer.done():
            await asyncio.to_thread(self.post, "/v1/sessions/agent/tools", event)
            await asyncio.wait([answer], timeout=0.5)
        return await answer

    async def status(self) -> str:
        return " ".join((await self.mesh.command("status")).stdout.split())


@pytest.fixture
def node(nats_server: NatsServer, slow_model: Path, tmp_path: Path) -> Iterator[Node]:
    port = free_port()
    arguments = "enforce_eager=true,num_gpu_blocks_override=64,max_model_len=1024,dtype=float32"
    env = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_MODEL": str(slow_model),
        "KVMESH_WORKER_BLOCK_SIZE": str(SIZE),
        "KVMESH_VLLM_KVBM": "true",
        "KVMESH_VLLM_ARGS": arguments,
        "KVMESH_KVBM_HOST_BYTES": str(16 << 20),
        "KVMESH_KVBM_DISK_PATH": str(tmp_path / "disk"),
        "KVMESH_KVBM_DISK_FREQUENCY": "1",
        "KVMESH_KVBM_METRICS_PORT": str(port),
    }
    mesh = Mesh(nats_server.url, tmp_path, env)
    mesh.start("kvbm", "kvbm-0")
    mesh.start_all(workers=1)
    yield Node(mesh, port)
    mesh.stop()


async def test_a_session_finds_its_blocks_in_memory_that_were_on_disk(node: Node) -> None:
    """The forecast of its return has them loaded; vLLM then gets them from memory."""
    await node.mesh.ready(START_S)
    first = await node.complete_before_a_tool()
    blocks = first["usage"]["prompt_tokens"] // SIZE
    await eventually(lambda: node.metric("return_forecasts_total") > 0, what="the forecast")
    await eventually(lambda: node.metric("blocks", 'tier="2"') >= blocks, what="blocks on disk")
    node.post("/v1/cache/clear", {"model": "slow", "tiers": [0, 1]})
    await eventually(lambda: node.metric("blocks", 'tier="1"') >= blocks, what="blocks in memory")
    assert node.metric("restored_bytes_total") > 0
    again = node.complete(nvext={"extra_fields": ["cache"]})
    engine, memory = again["nvext"]["cache"]["tiers"][:2]
    assert engine == 0
    assert memory == sum(again["nvext"]["cache"]["tiers"]) >= (blocks - 1) * SIZE
    await eventually(lambda: node.metric("restored_read_bytes_total") > 0, what="they were read")
    assert re.search("restores before returns: (trial|on)", await node.status())
