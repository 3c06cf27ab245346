"""Images before vLLM, in a worker and beside it: tokens, hits, and those that routers expect."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engines.test_vllm_mesh import SIZE, START_S, latest_request, make_mesh
from support.images import data_url, image
from support.mesh import Mesh
from support.nats import NatsServer
from support.vision_models import make_idefics3
from support.vllm_server import VllmServer, vllm_server
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Decision, MessageDecoder, Outcome, RouteEvent

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
TEXT = "What is in this picture, and what is beside it? " * 4
SIZES = ((112, 112), (112, 56), (40, 200))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_idefics3(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    events = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    arguments = ["--max-model-len", "1024", "--enable-prompt-tokens-details"]
    arguments += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, **events})]
    arguments += ["--enable-scale-out"]
    # which it cannot tell from the template
    arguments += ["--chat-template-content-format", "openai"]
    with vllm_server(model, folder, *arguments, blocks=256) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "openai"])
async def mesh(
    nats_server: NatsServer,
    server: VllmServer,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Mesh]:
    await server.ready()
    beside = {
        "KVMESH_WORKER_ENGINE": "openai",
        "KVMESH_REMOTE_URL": server.url,
        "KVMESH_REMOTE_KV_EVENTS": f"ipc://{server.log.parent}/events",
        "KVMESH_REMOTE_KV_REPLAY": f"ipc://{server.log.parent}/replay",
    }
    folder, more = tmp_path_factory.mktemp("mesh"), beside if request.param == "openai" else {}
    made = make_mesh(nats_server, folder, model, **more)
    made.start_all(workers=1)
    yield made
    made.stop()


def shown(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


def chat(mesh: Mesh | VllmServer, *messages: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{mesh.url}/v1/chat/completions",
        json.dumps(body([*messages])).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_the_model_gets_what_vllm_alone_gives_it(mesh: Mesh, server: VllmServer) -> None:
    await mesh.ready(START_S)
    red, blue = image("red", SIZES[0]), image("blue", SIZES[1])
    noise = image("green", (300, 200), "JPEG")  # of no whole number of cells
    counts = set[int]()
    for content in (
        [text(TEXT), shown(red)],
        [text(TEXT), shown(blue)],
        [shown(red), text("and"), shown(blue), text(TEXT), shown(noise)],
        [shown(red), shown(red)],
    ):
        own = await asyncio.to_thread(chat, mesh, user(*content))
        wanted = await asyncio.to_thread(chat, server, user(*content))
        assert own["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
        counts.add(own["usage"]["prompt_tokens"])
        answers = [each["choices"][0]["message"]["content"] for each in (own, wanted)]
        assert answers[0] == answers[1]
    assert len(counts) == 4  # sizes differ


async def test_hits_of_a_conversation_are_the_expected_ones(mesh: Mesh) -> None:
    await mesh.ready(START_S)
    bus = await Bus.connect(mesh.options, "test")
    routes: list[Decision | Outcome] = []

    async def record(event: Decision | Outcome) -> None:
        routes.append(event)

    decoder: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
    await bus.subscribe(bus.subjects.route("tiny"), decoder, record)
    first, second = image("maroon", SIZES[0]), image("navy", SIZES[0])
    opening = user(text("Compare. " + TEXT), shown(first), text(TEXT))
    messages = [opening]
    turn, counts = 0, list[int]()

    async def ask(*asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal turn
        answer = await asyncio.to_thread(chat, mesh, *asked)
        found = await eventually(lambda: latest_request(routes, turn), what="its outcome")
        assert found is not None
        decision, outcome = found
        turn += 1
        counts.append(cached(answer))
        assert outcome.cached_tokens == counts[-1]
        assert sum(decision.chosen.overlap) * SIZE == counts[-1]
        return answer

    for number in range(3):
        answer = await ask(*messages)
        words = answer["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": words},
            user(text(f"And now? {number}"), shown(second)),
        ]
    assert counts[0] < counts[1] < counts[2]
    # another image at the same place shares no block with the image
    before = await ask(user(text("Compare. " + TEXT)))
    await ask(user(text("Compare. " + TEXT), shown(second), text(TEXT)))
    assert 0 < counts[-1] <= before["usage"]["prompt_tokens"]
    await bus.close()
