"""Routers learn the speeds of an embedded vLLM and of a vLLM server, and send the slow one less."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.delays import SCHEDULER, delayed
from support.frontend import client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.vllm import SIZE
from support.vllm_server import VllmServer, vllm_server
from support.wait import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
START_S = 400
BATCH = 12
LATEST = 4  # batches
MOST_BATCHES = 40
FAST = delayed(0.02, 0.0002)
SLOW = delayed(0.1, 0.001)


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[VllmServer]:
    events = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    arguments = ["--max-model-len", "1024", "--enable-prompt-tokens-details"]
    arguments += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, **events})]
    arguments += ["--scheduler-cls", SCHEDULER]
    with vllm_server(tiny_model, tmp_path, *arguments, blocks=256, env=SLOW) as started:
        yield started


@pytest.fixture
def mesh(
    nats_server: NatsServer, server: VllmServer, tiny_model: Path, tmp_path: Path
) -> Iterator[Mesh]:
    """A fast embedded vLLM, and a worker beside a slow server."""
    shared = {"KVMESH_WORKER_MODEL": str(tiny_model), "KVMESH_WORKER_BLOCK_SIZE": str(SIZE)}
    arguments = "enforce_eager=true,num_gpu_blocks_override=256,max_model_len=1024,dtype=float32"
    made = Mesh(nats_server.url, tmp_path, shared)
    made.start_all(workers=0)
    embedded = {"KVMESH_WORKER_ENGINE": "vllm"}
    embedded |= {"KVMESH_VLLM_ARGS": f"{arguments},scheduler_cls={SCHEDULER}"}
    made.start("worker", "fast", **embedded, **FAST)
    yield made
    made.stop()


async def test_a_slow_server_gets_less_and_learned_says_so(mesh: Mesh, server: VllmServer) -> None:
    """The worker reads the server's steps, and measures their time by its own requests."""
    await server.ready()
    beside = {"KVMESH_WORKER_ENGINE": "openai", "KVMESH_REMOTE_URL": server.url}
    beside |= {"KVMESH_REMOTE_KV_EVENTS": f"ipc://{mesh.folder}/events"}
    mesh.start("worker", "slow", **beside, KVMESH_REMOTE_KV_REPLAY=f"ipc://{mesh.folder}/replay")
    await mesh.ready(START_S)
    await eventually(lambda: mesh.live_workers() == 2, timeout=START_S, what="both serve")
    numbers = count()
    async with client_session() as client:
        latest: deque[Counter[str]] = deque(maxlen=LATEST)
        for _ in range(MOST_BATCHES):
            served = [serving_worker(mesh, client, next(numbers)) for _ in range(BATCH)]
            latest.append(Counter(await asyncio.gather(*served)))
            share = sum(found["slow"] for found in latest) / (BATCH * LATEST)
            known = len(latest) == LATEST and (await speeds(mesh)).get("slow", 1.0) < 0.5
            if known and share < 0.35:
                break
        else:
            raise AssertionError((latest, await speeds(mesh), mesh.logs()))
    learned = json.loads((await mesh.command("plan", "learned", "--json")).stdout)
    found = [one for one in learned if one["learner"] == "speeds"]
    assert [(one["model"], one["fallback"]) for one in found] == [("tiny", "equal speeds")]
    assert found[0]["observations"] > 0


async def serving_worker(mesh: Mesh, client: aiohttp.ClientSession, number: int) -> str:
    """The name of the worker that served a unique prompt of 300 tokens."""
    body = {
        "model": "tiny",
        "prompt": f"{number} is what I count. " * 40,
        "max_tokens": 12,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["worker_id"]},
    }
    async with client.post(f"{mesh.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        instance: str = (await answer.json())["nvext"]["worker_id"]["instance"]
    return instance.rpartition("-")[0]


async def speeds(mesh: Mesh) -> dict[str, float]:
    """The measured speed of each worker relative to the median one."""
    report: dict[str, Any] = json.loads((await mesh.command("status", "--json")).stdout)
    return {m["card"]["name"]: m["speed"][0]["speed"] for m in report["instances"] if m["speed"]}
