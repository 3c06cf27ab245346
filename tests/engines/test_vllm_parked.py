"""A parked vLLM behind the whole mesh: it takes no device before it is promoted, then serves."""

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Instance, Role
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
ARGS = "num_gpu_blocks_override=64,max_model_len=1024,dtype=float32"
START_S = 400


def complete(mesh: Mesh) -> int:
    """Send one request; the number of its tokens."""
    body = {"model": "tiny", "prompt": "What is a mesh?", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        mesh.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


async def test_a_parked_vllm_serves_once_it_is_promoted(
    nats_server: NatsServer, tiny_model: Path, tmp_path: Path
) -> None:
    settings = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_MODEL": str(tiny_model),
        "KVMESH_WORKER_BLOCK_SIZE": "32",
        "KVMESH_WORKER_PARKED": "true",
        "KVMESH_VLLM_ARGS": ARGS,
    }
    mesh = Mesh(nats_server.url, tmp_path, settings)
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, StreamLimits())
    directory = Directory(bus, StreamLimits())
    await directory.open()
    mesh.start_all(workers=1)

    def only(role: Role) -> Instance | None:
        return next((card for card in directory.instances if card.role is role), None)

    try:
        await eventually(lambda: only(Role.PARKED), timeout=START_S, what="it parks")
        parked = only(Role.PARKED)
        assert parked is not None
        assert parked.parked_for == "tiny"
        assert only(Role.WORKER) is None
        done = await mesh.command("fleet", "promote", "worker-0")
        assert done.returncode == 0, done.stderr
        await eventually(lambda: only(Role.WORKER), timeout=START_S, what="it serves")
        worker = only(Role.WORKER)
        assert worker is not None
        assert worker.instance == parked.instance, "the same process"
        seconds = {phase.name: phase.seconds for phase in worker.phases}
        print(seconds, worker.startup_s, worker.promoted_s)
        assert seconds["parked"] > 0
        assert sum(seconds.values()) - seconds["parked"] <= worker.startup_s + 0.1
        assert 0 < worker.promoted_s < worker.startup_s
        await mesh.ready(START_S)
        assert await asyncio.to_thread(complete, mesh) == 8
    finally:
        await directory.close()
        await bus.close()
        mesh.stop()
