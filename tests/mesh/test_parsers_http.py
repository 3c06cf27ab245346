"""Every parser through every API that parses: a stream has the content of the whole response."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api, Content
from support.frontend import (
    ROUTES,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    client_session,
    scripted_router,
    scripted_worker,
)
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.wait import eventually
from tokenizers import Tokenizer
from unit.frontend.dialects.outputs import CASES, TOOLS, Case

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Chunk, Routed, RouteReply, RouteRequest
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.demo import model_dir

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = StreamLimits(kv_bytes=256 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)
TOKENIZER = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
CHUNK = 3  # tokens
CACHED = [16, 8]


def model_of(case: Case) -> str:
    """The name of the model with the parsers of a case."""
    return f"{case.tool or 'none'}-{case.reasoning or 'none'}"


MODELS = {model_of(case): case for case in CASES}


class ModelRouter(ScriptedRouter):
    """Routes each request to the one worker of its model."""

    def choose(self, request: RouteRequest) -> RouteReply:
        return Routed(instance=f"{request.model}-1", rank=0, overlap=[0])


@dataclass
class Stage:
    """One frontend, and a scripted worker per pair of parsers."""

    client: Client
    workers: dict[str, ScriptedWorker]

    async def content(
        self, api: Api, model: str, raw: str, stream: bool, **fields: Any
    ) -> tuple[Content, int]:
        """Content of a response to the engine output `raw`, and the number of output tokens."""
        worker = self.workers[model]
        number = len(worker.works)
        body = api.body("Weather?", 900, model=model, stream=stream, **fields)
        response = asyncio.create_task(api.send(self.client, body))
        work = await worker.work(number)
        tokens = TOKENIZER.encode(raw, add_special_tokens=False).ids
        for start in range(0, len(tokens), CHUNK):
            last = start + CHUNK >= len(tokens)
            chunk = Chunk(work.request, start, tokens[start : start + CHUNK])
            chunk.cached, chunk.finish = (None if start else CACHED), ("stop" if last else None)
            await worker.send(work, chunk)
        return await response, len(tokens)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("parsers"), stream_env(LIMITS))
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    mesh.start("frontend", "frontend-0")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(scripted_router(bus, LIMITS))
        session = await stack.enter_async_context(client_session())
        router, workers = ModelRouter(), {}
        for model, case in MODELS.items():
            await bus.serve(bus.subjects.router(model), ROUTES, router.answer, queue="router")
            parsers: dict[str, Any] = {
                "tool_parser": case.tool or "none",
                "reasoning_parser": case.reasoning or "none",
            }
            worker = scripted_worker(bus, LIMITS, model, served=model, **parsers)
            workers[model] = await stack.enter_async_context(worker)
        stage = Stage(Client(mesh.url, session), workers)

        async def all_loaded() -> bool:
            try:
                async with session.get(f"{mesh.url}/v1/models") as response:
                    listed = len((await response.json())["data"])
                return listed == len(MODELS)
            except aiohttp.ClientError:
                return False

        await eventually(all_loaded, what="all models are loaded")
        yield stage
    mesh.stop()
    await bus.close()


def tools(api: Api) -> list[dict[str, Any]]:
    functions = [
        {"name": t.name, "description": t.description, "parameters": t.parameters} for t in TOOLS
    ]
    if api is CHAT:
        return [{"type": "function", "function": function} for function in functions]
    if api is RESPONSES:
        return [{"type": "function", **function} for function in functions]
    return [{"name": t.name, "input_schema": t.parameters} for t in TOOLS]


def joined(case: Case, kind: str) -> str:
    return "".join(content for piece, _, content in case.pieces if piece == kind)


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES], ids=lambda api: api.name)
@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
async def test_a_stream_and_a_whole_response_have_the_published_content(
    stage: Stage, case: Case, api: Api
) -> None:
    model = model_of(case)
    whole, count = await stage.content(api, model, case.raw, False, tools=tools(api))
    stream, _ = await stage.content(api, model, case.raw, True, tools=tools(api))
    assert stream == whole
    assert whole.thinking == joined(case, "thinking")
    assert whole.text == joined(case, "text")
    assert whole.calls == [(name, value) for kind, name, value in case.pieces if kind == "call"]
    assert (whole.output, whole.cached) == (count, sum(CACHED))
    called = {CHAT: "tool_calls", MESSAGES: "tool_use", RESPONSES: "completed"}
    spoken = {CHAT: "stop", MESSAGES: "end_turn", RESPONSES: "completed"}
    assert whole.finish == (called if whole.calls else spoken)[api]


@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
async def test_completions_return_the_output_unparsed(stage: Stage, case: Case) -> None:
    """Special tokens of the tokenizer are not text."""
    visible = TOKENIZER.decode(TOKENIZER.encode(case.raw, add_special_tokens=False).ids)
    whole, _ = await stage.content(COMPLETIONS, model_of(case), case.raw, False)
    stream, _ = await stage.content(COMPLETIONS, model_of(case), case.raw, True)
    assert stream == whole
    assert whole.text == visible


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES], ids=lambda api: api.name)
async def test_without_tools_calls_are_text(stage: Stage, api: Api) -> None:
    call = f"<tool_call>\n{json.dumps({'name': 'now', 'arguments': {}})}\n</tool_call>"
    contents = [
        (await stage.content(api, "hermes-none", call, stream))[0] for stream in (False, True)
    ]
    assert contents[0] == contents[1]
    assert (contents[0].text, contents[0].calls) == (call, [])
