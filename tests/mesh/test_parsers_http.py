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
from support.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api, Content, streamed
from support.frontend import (
    LIMITS,
    ROUTES,
    TOKENIZER,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    client_session,
    events,
    scripted_router,
    scripted_worker,
)
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.wait import eventually
from unit.frontend.dialects.outputs import CASES, TOOLS, Case

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Chunk, Routed, RouteReply, RouteRequest
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.frontend.conversation import GAP

pytestmark = pytest.mark.asyncio(loop_scope="module")
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
        self, api: Api, model: str, raw: str, stream: bool, end: str = "stop", **fields: Any
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
            chunk.cached, chunk.finish = (None if start else CACHED), (end if last else None)
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


def joined(case: Case, kind: str, api: Api) -> str:
    """The texts of a kind; chat has one field for all, with gaps between them."""
    gap = GAP if api is CHAT else ""
    return gap.join(content for piece, _, content in case.pieces if piece == kind)


@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES], ids=lambda api: api.name)
@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
async def test_a_stream_and_a_whole_response_have_the_published_content(
    stage: Stage, case: Case, api: Api
) -> None:
    model = model_of(case)
    whole, count = await stage.content(api, model, case.raw, False, tools=tools(api))
    stream, _ = await stage.content(api, model, case.raw, True, tools=tools(api))
    assert stream == whole
    assert whole.thinking == joined(case, "thinking", api)
    assert whole.text == joined(case, "text", api)
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


# --- stop strings and limits ---

THINKING = "I count STOP,\n\nthree."
CALL = {"name": "get_weather", "arguments": {"city": "STOP\n\n}"}}
ANSWER = (
    f"<think>\n{THINKING}\n</think>\n\nFirst ST.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n"
    "Second 🧿 go STOP never."
)
STOPPED = {CHAT: "tool_calls", MESSAGES: "stop_sequence", RESPONSES: "completed"}
CUT = {CHAT: "length", MESSAGES: "max_tokens", RESPONSES: "incomplete", COMPLETIONS: "length"}


def stops(api: Api, *texts: str) -> dict[str, Any]:
    return {"stop_sequences" if api is MESSAGES else "stop": list(texts)}


@streamed
@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=lambda api: api.name)
async def test_a_stop_string_ends_the_visible_text(stage: Stage, api: Api, stream: bool) -> None:
    fields = {**stops(api, "STOP", "}"), "tools": tools(api)}
    found, _ = await stage.content(api, "hermes-qwen3", ANSWER, stream, **fields)
    assert found.thinking == THINKING
    assert found.calls == [("get_weather", CALL["arguments"])]
    gap = GAP if api is CHAT else ""
    assert (found.text, found.finish) == (f"First ST.{gap}Second 🧿 go ", STOPPED[api])


@streamed
async def test_a_stop_string_ends_an_unparsed_completion(stage: Stage, stream: bool) -> None:
    raw = "First ST. Second 🧿 go STOP never."
    found, _ = await stage.content(COMPLETIONS, "hermes-qwen3", raw, stream, stop=["STOP"])
    assert (found.text, found.finish) == ("First ST. Second 🧿 go ", "stop")


@streamed
@pytest.mark.parametrize("end", [24, 50, 130], ids=["thinking", "text", "call"])
@pytest.mark.parametrize("api", [CHAT, MESSAGES, RESPONSES, COMPLETIONS], ids=lambda api: api.name)
async def test_an_answer_cut_by_its_limit_says_so(
    stage: Stage, api: Api, end: int, stream: bool
) -> None:
    fields: dict[str, Any] = {} if api is COMPLETIONS else {"tools": tools(api)}
    if api in (CHAT, MESSAGES):
        fields |= stops(api, "}")
    raw = ANSWER[:end]
    found, _ = await stage.content(api, "hermes-qwen3", raw, stream, end="length", **fields)
    assert found.finish == CUT[api]


# --- log-probabilities ---


async def answer_with_logprobs(stage: Stage, api: Api, stream: bool) -> tuple[Any, list[int]]:
    worker = stage.workers["hermes-qwen3"]
    number = len(worker.works)
    fields: dict[str, Any] = {"logprobs": True, "stop": ["STOP"]}
    if api is RESPONSES:
        fields = {"include": ["message.output_text.logprobs"]}
    fields["tools"] = tools(api)
    body = api.body("Weather?", 900, model="hermes-qwen3", stream=stream, **fields)
    response = asyncio.create_task(stage.client.stream(api.path, body))
    work = await worker.work(number)
    tokens = TOKENIZER.encode(ANSWER, add_special_tokens=False).ids
    for start in range(0, len(tokens), CHUNK):
        ids = tokens[start : start + CHUNK]
        known = [{token: -1.0 - at, 7: -0.5} for at, token in enumerate(ids, start)]
        last = start + CHUNK >= len(tokens)
        chunk = Chunk(work.request, start, ids, logprobs=known, finish="stop" if last else None)
        await worker.send(work, chunk)
    answer = await response
    assert answer.status == 200
    if not stream:
        return await answer.json(), tokens
    return [event for event in await events(answer) if event != "[DONE]"], tokens


def check(entries: list[Any], text: str) -> None:
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    values = [entry["logprob"] for entry in entries]
    assert values == sorted(set(values), reverse=True)


@streamed
async def test_chat_lists_the_tokens_of_its_content(stage: Stage, stream: bool) -> None:
    answer, _ = await answer_with_logprobs(stage, CHAT, stream)
    if stream:
        choices = [choice for chunk in answer for choice in chunk["choices"]]
        entries = []
        for choice in choices:
            found = (choice.get("logprobs") or {"content": []})["content"]
            entries += found
            if found:
                shown = choice["delta"]["content"].removeprefix(GAP)
                assert b"".join(bytes(entry["bytes"]) for entry in found) == shown.encode()
    else:
        entries = answer["choices"][0]["logprobs"]["content"]
    # the gap between two texts is not the model's
    check(entries, "First ST.Second 🧿 go ")
    assert all(entry["top_logprobs"] == [] for entry in entries)


@streamed
async def test_responses_lists_the_tokens_of_each_text(stage: Stage, stream: bool) -> None:
    answer, _ = await answer_with_logprobs(stage, RESPONSES, stream)
    items = (answer[-1]["response"] if stream else answer)["output"]
    parts = [item["content"][0] for item in items if item["type"] == "message"]
    assert [part["text"] for part in parts] == ["First ST.", "Second 🧿 go STOP never."]
    for part in parts:
        check(part["logprobs"], part["text"])
    if stream:
        deltas = [event for event in answer if event["type"] == "response.output_text.delta"]
        for delta in deltas:
            shown = b"".join(bytes(entry["bytes"]) for entry in delta["logprobs"])
            assert shown == delta["delta"].encode()
        listed = [entry for delta in deltas for entry in delta["logprobs"]]
        assert listed == [entry for part in parts for entry in part["logprobs"]]


async def test_a_choice_that_a_stop_string_ends_stops_its_engine(stage: Stage) -> None:
    worker = stage.workers["hermes-qwen3"]
    number = len(worker.works)
    body = CHAT.body("Weather?", 900, model="hermes-qwen3", n=2, stop=["STOP"])
    response = asyncio.create_task(stage.client.post(CHAT.path, body))
    stopped, other = [await worker.work(number + at) for at in range(2)]
    tokens = TOKENIZER.encode("go STOP on", add_special_tokens=False).ids
    await worker.send(stopped, Chunk(stopped.request, 0, tokens))
    await eventually(lambda: stopped.request in worker.cancelled, what="the engine is stopped")
    assert not response.done()
    last = TOKENIZER.encode("Yes", add_special_tokens=False).ids
    await worker.send(other, Chunk(other.request, 0, last, finish="stop"))
    status, answer = await response
    assert status == 200
    assert sorted(choice["message"]["content"] for choice in answer["choices"]) == ["Yes", "go "]
    assert worker.cancelled.count(stopped.request) == 1
