"""A mesh whose worker stands beside a vLLM server: speculative prefill, as `explain` shows it."""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("server")
    events = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    arguments = ["--max-model-len", "2048", "--enable-prompt-tokens-details"]
    arguments += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, **events})]
    with vllm_server(tiny_model, folder, *arguments, blocks=256) as started:
        variables = {
            "KVMESH_WORKER_ENGINE": "openai",
            "KVMESH_WORKER_MODEL": str(tiny_model),
            "KVMESH_WORKER_BLOCK_SIZE": str(SIZE),
            "KVMESH_REMOTE_URL": started.url,
            "KVMESH_REMOTE_KV_EVENTS": events["endpoint"],
            "KVMESH_REMOTE_KV_REPLAY": events["replay_endpoint"],
        }
        yield started, variables


def chat(mesh: Mesh, messages: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "temperature": 0, **fields}
    url, headers = f"{mesh.url}/v1/chat/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def ended_requests(server: VllmServer) -> float:
    """Requests that the server has completed, slices of prefetches included."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("vllm:request_success_total{")
    )


def explain(mesh: Mesh, request: str) -> str:
    command = [sys.executable, "-m", "kvmesh.cli.main", "explain", request]
    env = {"KVMESH_NATS_URL": mesh.nats_url, "KVMESH_NATS_NAMESPACE": mesh.namespace}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )
    return done.stdout + done.stderr


async def test_a_hinted_turn_finds_its_prefix_computed(
    server: tuple[VllmServer, dict[str, str]], nats_server: NatsServer, tmp_path: Path
) -> None:
    started, variables = server
    await started.ready()
    mesh = Mesh(nats_server.url, tmp_path, variables)
    mesh.start_all(workers=1)
    try:
        await mesh.ready(START_S)
        await converse(mesh, started)
    finally:
        mesh.stop()


async def converse(mesh: Mesh, server: VllmServer) -> None:
    """Two turns, the first with the hint, and what `explain` shows of the second."""
    sentence = "Word for word, and nothing else than that. " * 12
    schema = {"type": "object", "properties": {"a": {"enum": [sentence]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Please say: {sentence}"}]
    hint = {"agent_hints": {"speculative_prefill": True}}
    before = ended_requests(server)
    first = await asyncio.to_thread(
        chat, mesh, messages, response_format=form, max_tokens=1200, nvext=hint
    )
    await eventually(lambda: ended_requests(server) >= before + 3, what="the answer and two slices")
    messages += [first["choices"][0]["message"], {"role": "user", "content": "More."}]
    second = await asyncio.to_thread(chat, mesh, messages, max_tokens=4)
    useful = "kvmesh_frontend_speculative_tokens_total"
    await eventually(lambda: mesh.metric(useful) > 0)
    pattern = rf"computed ahead after {first['id']}: [\d,]+ of them used"
    await eventually(lambda: re.search(pattern, explain(mesh, second["id"])), what="explain")
