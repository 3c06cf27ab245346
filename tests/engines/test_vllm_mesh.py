"""vLLM behind the whole mesh: real processes, HTTP, vLLM's cached tokens against the router's."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Decision, MessageDecoder, Outcome, RouteEvent

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
ARGS = "enforce_eager=true,num_gpu_blocks_override=64,max_model_len=1024,dtype=float32"
SIZE = 32
START_S = 400


def make_mesh(nats_server: NatsServer, folder: Path, model: Path, **more: str) -> Mesh:
    settings = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_MODEL": str(model),
        "KVMESH_WORKER_BLOCK_SIZE": str(SIZE),
        "KVMESH_VLLM_ARGS": ARGS,
        "KVMESH_ROUTER_PREDICTED_TTL_S": "0",
    }
    return Mesh(nats_server.url, folder, {**settings, **more})


@pytest.fixture(scope="module")
def mesh(
    nats_server: NatsServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    made = make_mesh(nats_server, tmp_path_factory.mktemp("mesh"), tiny_model)
    made.start_all(workers=1)
    yield made
    made.stop()


def post(mesh: Mesh, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        mesh.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def chat(mesh: Mesh, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0}
    return post(mesh, "/v1/chat/completions", body)


def latest_request(routes: list[Decision | Outcome], turn: int) -> tuple[Decision, Outcome] | None:
    """Decision and outcome of the newest request, once both are published."""
    decisions = [event for event in routes if isinstance(event, Decision)]
    outcomes = [event for event in routes if isinstance(event, Outcome)]
    return (decisions[-1], outcomes[-1]) if len(outcomes) == len(decisions) == turn + 1 else None


async def test_prefix_hits_of_a_conversation_equal_the_expected_ones(mesh: Mesh) -> None:
    await mesh.ready(START_S)
    bus = await Bus.connect(mesh.options, "test")
    routes: list[Decision | Outcome] = []

    async def record(event: Decision | Outcome) -> None:
        routes.append(event)

    decoder: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
    await bus.subscribe(bus.subjects.route("tiny"), decoder, record)
    messages = [{"role": "user", "content": "What is a mesh? " * 20}]
    for turn in range(4):
        answer = await asyncio.to_thread(chat, mesh, messages)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == (turn > 0)
        found = await eventually(lambda: latest_request(routes, turn), what="its outcome")  # noqa: B023
        assert found is not None
        decision, outcome = found
        assert outcome.cached_tokens == cached
        assert sum(decision.chosen.overlap) * SIZE == cached
        text = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"And then? {turn}"})
    await bus.close()


async def test_evictions_under_load_reach_the_index(mesh: Mesh) -> None:
    await mesh.ready(START_S)
    first = [{"role": "user", "content": "Remember this sentence well. " * 20}]
    chat(mesh, first)
    for i in range(12):
        chat(mesh, [{"role": "user", "content": f"{i} is another matter altogether. " * 30}])
    before = mesh.metric("kvmesh_frontend_cached_tokens_total")
    again = chat(mesh, first)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] < 64
    assert mesh.metric("kvmesh_frontend_cached_tokens_total") - before < 64


async def test_a_killed_worker_leaves_no_engine_behind(mesh: Mesh) -> None:
    psutil = pytest.importorskip("psutil")
    await mesh.ready(START_S)
    started = psutil.Process(mesh.processes["worker-0"].pid).children(recursive=True)
    assert any("EngineCore" in child.name() for child in started)
    mesh.kill("worker-0")
    await eventually(lambda: not any(map(_runs, started)), what="all its processes have ended")


async def test_a_worker_that_is_killed_in_its_start_leaves_no_engine_behind(mesh: Mesh) -> None:
    psutil = pytest.importorskip("psutil")
    mesh.start("worker", "worker-9")
    worker = psutil.Process(mesh.processes["worker-9"].pid)

    def started() -> list[Any]:
        found: list[Any] = worker.children(recursive=True)
        return found if any("EngineCore" in child.name() for child in found) else []

    processes = await eventually(started, START_S, what="its engine's process is there")
    mesh.kill("worker-9")
    await eventually(lambda: not any(map(_runs, processes)), what="all its processes have ended")


def _runs(process: Any) -> bool:
    return bool(process.is_running()) and process.status() != "zombie"


@pytest.fixture
def disaggregated(nats_server: NatsServer, tiny_model: Path, tmp_path: Path) -> Iterator[Mesh]:
    """One vLLM that prefills, one that decodes."""
    pytest.importorskip("nixl")
    made = make_mesh(nats_server, tmp_path, tiny_model, KVMESH_ROUTER_DISAGG_TOKENS="100")
    made.start_all(workers=0)
    for part in ("prefill", "decode"):
        made.start("worker", part, KVMESH_WORKER_SERVES=part)
    yield made
    made.stop()


async def test_a_prompt_is_prefilled_by_another_vllm(disaggregated: Mesh) -> None:
    def both_serve() -> bool:
        return disaggregated.live_workers() == 2

    await disaggregated.ready(START_S)
    await eventually(both_serve, timeout=START_S, what="both vLLM serve")
    messages = [{"role": "user", "content": "What is a mesh? " * 20}]
    first = await asyncio.to_thread(chat, disaggregated, messages)
    assert disaggregated.metric("kvmesh_frontend_prefills_total") == 1
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "was not computed" not in disaggregated.logs()
    again = await asyncio.to_thread(chat, disaggregated, messages)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    assert disaggregated.metric("kvmesh_frontend_prefills_total") == 1
