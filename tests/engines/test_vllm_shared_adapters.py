"""LoRA adapters that travel between two real vLLM workers, of the settings and at run time."""

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapter_cards import AdapterCards
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
ARGS = "enforce_eager=true,num_gpu_blocks_override=64,max_model_len=1024,dtype=float32"
START_S = 400


@pytest.fixture(scope="module")
def mesh(
    nats_server: NatsServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    """The first worker has an adapter of its settings; each has a store of its own."""
    from support import lora

    folder = tmp_path_factory.mktemp("mesh")
    env = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_MODEL": str(tiny_model),
        "KVMESH_WORKER_BLOCK_SIZE": "32",
        "KVMESH_WORKER_MAX_ADAPTERS": "2",
        "KVMESH_VLLM_ARGS": ARGS,
        "KVMESH_WEIGHTS_SHARE": "true",
    }
    made = Mesh(nats_server.url, folder, env)
    made.start("indexer", "indexer-0")
    made.start("router", "router-0")
    stores = [{"KVMESH_WEIGHTS_DIRECTORY": str(folder / f"store-{n}")} for n in range(2)]
    poet = lora.make_adapter(folder / "poet")
    made.start("worker", "worker-0", **stores[0], KVMESH_VLLM_ADAPTERS=f"poet={poet}")
    made.start("worker", "worker-1", **stores[1])
    made.start("frontend", "frontend-0")
    yield made
    made.stop()


def answer(mesh: Mesh, model: str, instance: str) -> list[Any]:
    """The tokens with their log probabilities, as one worker computes them."""
    body = {
        "model": model,
        "prompt": "What is a mesh? " * 8,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 2,
        "nvext": {"backend_instance_id": instance},
    }
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{mesh.url}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        logprobs = json.load(reply)["choices"][0]["logprobs"]
    return [logprobs["tokens"], [round(value, 4) for value in logprobs["token_logprobs"]]]


async def test_the_second_worker_answers_with_the_adapter_of_the_first(
    mesh: Mesh, tmp_path: Path
) -> None:
    from support import lora

    await mesh.ready(START_S)
    async with AdapterCards(mesh) as cards:
        await eventually(lambda: mesh.live_workers() == 2, timeout=START_S, what="both serve")
        await eventually(lambda: cards.offers_only("worker-0", "poet"), what="its own adapter")
        shutil.rmtree(mesh.folder / "poet")
        one, two = (cards.card(name).instance for name in ("worker-0", "worker-1"))

        done = await mesh.command("model", "adapter", "load", "poet", "--worker", "worker-1")
        assert done.returncode == 0, done
        plain = await asyncio.to_thread(answer, mesh, "tiny", one)
        first = await asyncio.to_thread(answer, mesh, "poet", one)
        assert first != plain
        assert await asyncio.to_thread(answer, mesh, "poet", two) == first

        # a request for the second worker has the router load what the first one offers
        critic = lora.make_adapter(tmp_path / "critic", seed=3)
        done = await mesh.command(
            *(
                "model",
                "adapter",
                "load",
                "critic",
                str(critic),
                "--worker",
                "worker-0",
                "--evictable",
            )
        )
        assert done.returncode == 0, done
        await eventually(lambda: "critic" in cards.offered("worker-0"))
        expected = await asyncio.to_thread(answer, mesh, "critic", one)
        assert await asyncio.to_thread(answer, mesh, "critic", two) == expected != first
        await eventually(lambda: cards.loaded("worker-1") == {"poet", "critic"})
        listed = (await mesh.command("model", "adapter", "list")).stdout
        assert "files on worker-0, worker-1" in listed
