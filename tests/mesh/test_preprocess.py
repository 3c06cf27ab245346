"""Preprocessing through HTTP: a real frontend, and the work that its worker receives."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.frontend import (
    CONTEXT,
    LIMITS,
    MODEL,
    TOKENIZER,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    client_session,
    frontend_mesh,
    ids,
    scripted_router,
    scripted_worker,
)
from support.nats import NatsServer

from kvmesh.bus.messages import Chunk, Work

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOCK = {"type": "object", "properties": {"zone": {"type": "integer"}}}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
TOO_LONG = "one two three " * CONTEXT


@dataclass
class Stage:
    """One frontend with a scripted router and a scripted worker."""

    client: Client
    router: ScriptedRouter
    worker: ScriptedWorker

    async def complete(self, path: str, body: dict[str, Any], *outputs: str) -> tuple[Any, Any]:
        """Send a request and let the worker write `outputs`, one per choice: (works, response)."""
        response = asyncio.create_task(self.client.post(path, body))
        works = [await self.worker.work(number) for number in range(len(outputs))]
        for work, output in zip(works, outputs, strict=True):
            await self.worker.send(work, Chunk(work.request, 0, ids(output), finish="stop"))
        status, answer = await response
        assert status == 200, answer
        return works, answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with (
        frontend_mesh(nats_server.url, tmp_path_factory.mktemp("preprocess")) as (mesh, bus),
        scripted_router(bus, LIMITS) as router,
        scripted_worker(bus, LIMITS, "a") as worker,
        client_session() as session,
    ):
        router.order = [worker.instance]
        await mesh.ready()
        yield Stage(Client(mesh.url, session), router, worker)


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> Stage:
    shared.worker.works.clear()
    shared.router.requests.clear()
    return shared


def tokens(work: Work) -> list[int]:
    return array("I", work.tokens).tolist()


def text(work: Work) -> str:
    """The rendered prompt of a work, special tokens included."""
    return str(TOKENIZER.decode(tokens(work), skip_special_tokens=False))


def schema(work: Work) -> Any:
    """The JSON schema of what follows the thinking; None without a constraint."""
    guided = work.sampling.guided
    if guided is None:
        return None
    assert guided.kind == "structural_tag"
    *_, answer = json.loads(guided.value)["format"]["elements"]
    return answer["json_schema"]


# --- tool_choice: one body and one reading of the response per API ---


def chat(choice: Any, *names: str, **fields: Any) -> dict[str, Any]:
    functions = [{"name": name, "parameters": SCHEMAS[name]} for name in names]
    tools = [{"type": "function", "function": function} for function in functions]
    messages = [{"role": "user", "content": "Oslo"}]
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "function": {"name": choice}}
    return {"model": MODEL, "messages": messages, "tools": tools, "tool_choice": choice, **fields}


def responses(choice: Any, *names: str, **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "name": name, "parameters": SCHEMAS[name]} for name in names]
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "name": choice}
    return {"model": MODEL, "input": "Oslo", "tools": tools, "tool_choice": choice, **fields}


def messages(choice: Any, *names: str, **fields: Any) -> dict[str, Any]:
    tools = [{"name": name, "input_schema": SCHEMAS[name]} for name in names]
    kinds = {"auto": "auto", "none": "none", "required": "any"}
    chosen = {"type": kinds[choice]} if choice in kinds else {"type": "tool", "name": choice}
    content = [{"role": "user", "content": "Oslo"}]
    body = {"model": MODEL, "max_tokens": 100, "messages": content}
    return {**body, "tools": tools, "tool_choice": chosen, **fields}


def chat_calls(answer: Any) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def responses_calls(answer: Any) -> list[tuple[str, Any]]:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def messages_calls(answer: Any) -> list[tuple[str, Any]]:
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    return [(call["name"], call["input"]) for call in calls]


APIS = pytest.mark.parametrize(
    ("path", "body", "calls"),
    [
        pytest.param(CHAT, chat, chat_calls, id="chat"),
        pytest.param(RESPONSES, responses, responses_calls, id="responses"),
        pytest.param(MESSAGES, messages, messages_calls, id="messages"),
    ],
)


@APIS
async def test_one_required_tool_is_constrained_to_its_arguments(
    stage: Stage, path: str, body: Any, calls: Any
) -> None:
    sent = body("required", "get_weather")
    works, answer = await stage.complete(path, sent, '{"city": "Oslo"}')
    assert schema(works[0]) == WEATHER
    assert calls(answer) == [("get_weather", {"city": "Oslo"})]


@APIS
async def test_several_required_tools_are_constrained_to_a_list_of_calls(
    stage: Stage, path: str, body: Any, calls: Any
) -> None:
    output = (
        '[{"name": "get_time", "parameters": {"zone": 2}},'
        ' {"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    )
    works, answer = await stage.complete(path, body("required", *SCHEMAS), output)
    items = schema(works[0])["items"]["anyOf"]
    assert [item["properties"]["parameters"] for item in items] == [WEATHER, CLOCK]
    assert "maxItems" not in schema(works[0])
    assert calls(answer) == [("get_time", {"zone": 2}), ("get_weather", {"city": "Oslo"})]


@APIS
async def test_a_named_tool_is_constrained_to_its_own_arguments(
    stage: Stage, path: str, body: Any, calls: Any
) -> None:
    works, answer = await stage.complete(path, body("get_time", *SCHEMAS), '{"zone": 2}')
    assert schema(works[0]) == CLOCK
    assert calls(answer) == [("get_time", {"zone": 2})]


@APIS
async def test_tool_choice_none_neither_constrains_nor_shows_calls(
    stage: Stage, path: str, body: Any, calls: Any
) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": 2}}\n</tool_call>'
    works, answer = await stage.complete(path, body("none", *SCHEMAS), f"Before. {call} After.")
    assert schema(works[0]) is None
    assert calls(answer) == []
    shown = msgspec.json.encode(answer).decode()
    assert "Before." in shown
    assert "After." in shown
    assert "tool_call>" not in shown


CALL = '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_only_allowed_tools_are_called(stage: Stage, path: str, mode: str) -> None:
    body, calls = (chat, chat_calls) if path == CHAT else (responses, responses_calls)
    if path == CHAT:
        named = {"type": "function", "function": {"name": "get_time"}}
        listed: dict[str, Any] = {"tools": [named], "mode": mode}
        choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": listed}
    else:
        tools = [{"type": "web_search"}, {"type": "function", "name": "get_time"}]
        choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
    sent = body("auto", *SCHEMAS) | {"tool_choice": choice}
    output = CALL.replace("NAME", "get_weather") + CALL.replace("NAME", "get_time")
    works, answer = await stage.complete(path, sent, output)
    assert calls(answer) == [("get_time", {})]
    assert "get_weather" in text(works[0])
    guided = works[0].sampling.guided
    assert guided is not None
    assert "get_weather" not in guided.value
    unknown = json.loads(json.dumps(choice).replace("get_time", "none_such"))
    status, error = await stage.client.post(path, sent | {"tool_choice": unknown})
    assert status == 400
    assert "none_such" in error["error"]["message"]


@APIS
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tools_are_in_the_prompt_whatever_the_choice(
    stage: Stage, path: str, body: Any, calls: Any, choice: str
) -> None:
    works, _ = await stage.complete(path, body(choice, *SCHEMAS), "[]")
    assert "get_weather" in text(works[0])
    assert "get_time" in text(works[0])


async def test_a_single_call_is_required_without_parallel_calls(stage: Stage) -> None:
    sent = chat("required", *SCHEMAS, parallel_tool_calls=False)
    works, _ = await stage.complete(CHAT, sent, "[]")
    assert schema(works[0])["maxItems"] == 1
    stage.worker.works.clear()
    choice = {"type": "any", "disable_parallel_tool_use": True}
    sent = messages("required", *SCHEMAS) | {"tool_choice": choice}
    works, _ = await stage.complete(MESSAGES, sent, "[]")
    assert schema(works[0])["maxItems"] == 1


@APIS
@pytest.mark.parametrize(("choice", "names"), [("required", ()), ("absent", ("get_time",))])
async def test_a_choice_without_a_matching_tool_is_rejected(
    stage: Stage, path: str, body: Any, calls: Any, choice: str, names: tuple[str, ...]
) -> None:
    status, answer = await stage.client.post(path, body(choice, *names))
    assert status == 400
    assert "tool_choice" in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert stage.router.requests == []


# --- context length ---

LONG_PROMPTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": TOO_LONG}]}),
    (COMPLETIONS, {"prompt": TOO_LONG}),
    (COMPLETIONS, {"prompt": [5] * CONTEXT}),
    (RESPONSES, {"input": TOO_LONG}),
]
LONG_OUTPUTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": CONTEXT}),
    (COMPLETIONS, {"prompt": "Hi", "max_tokens": CONTEXT}),
    (RESPONSES, {"input": "Hi", "max_output_tokens": CONTEXT}),
]


@pytest.mark.parametrize(("path", "fields"), [*LONG_PROMPTS, *LONG_OUTPUTS])
async def test_openai_apis_report_an_exceeded_context(
    stage: Stage, path: str, fields: dict[str, Any]
) -> None:
    status, answer = await stage.client.post(path, {"model": MODEL, **fields})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT} tokens" in answer["error"]["message"]
    assert stage.router.requests == []


@pytest.mark.parametrize(
    ("content", "limit", "message"),
    [
        (TOO_LONG, 10, f"tokens > {CONTEXT} maximum"),
        ("Hi", CONTEXT, f"exceed context limit: {{}} + {CONTEXT} > {CONTEXT}"),
    ],
)
async def test_messages_reports_an_exceeded_context_in_anthropic_s_words(
    stage: Stage, content: str, limit: int, message: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    status, answer = await stage.client.post(MESSAGES, {**body, "max_tokens": limit})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    count = (await stage.client.post("/v1/messages/count_tokens", body))[1].get("input_tokens")
    assert message.format(count) in answer["error"]["message"]
    assert stage.router.requests == []


async def test_the_output_limit_is_the_rest_of_the_context(stage: Stage) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    works, answer = await stage.complete(CHAT, body, "Hello.")
    prompt = len(tokens(works[0]))
    assert works[0].sampling.max_tokens == CONTEXT - prompt
    assert answer["usage"]["prompt_tokens"] == prompt


# --- prompts of completions ---


async def test_each_prompt_of_an_array_is_one_choice(stage: Stage) -> None:
    prompts = ["One", "Two three"]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 4}
    works, answer = await stage.complete(COMPLETIONS, body, " a", " b")
    assert sorted(tokens(work) for work in works) == sorted([ids("One"), ids("Two three")])
    written = {tuple(tokens(w)): t for w, t in zip(works, (" a", " b"), strict=True)}
    expected = [written[tuple(ids(prompt))] for prompt in prompts]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == len(ids("One")) + len(ids("Two three"))


@pytest.mark.parametrize("prompt", [[100, 200, 300], [[100, 200, 300]]])
async def test_token_ids_reach_the_worker_unchanged(stage: Stage, prompt: list[Any]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    works, answer = await stage.complete(COMPLETIONS, body, " a")
    assert tokens(works[0]) == [100, 200, 300]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_texts_and_token_ids_may_be_mixed(stage: Stage) -> None:
    body = {"model": MODEL, "prompt": ["One", [100, 200]], "max_tokens": 4}
    works, answer = await stage.complete(COMPLETIONS, body, " a", " b")
    assert sorted(tokens(work) for work in works) == sorted([ids("One"), [100, 200]])
    assert len(answer["choices"]) == 2


async def test_choices_of_one_prompt_have_the_same_tokens(stage: Stage) -> None:
    body = {"model": MODEL, "prompt": "One", "n": 2, "max_tokens": 4, "echo": True}
    works, answer = await stage.complete(COMPLETIONS, body, " a", " a")
    assert [tokens(work) for work in works] == [ids("One")] * 2
    assert [choice["text"] for choice in answer["choices"]] == ["One a"] * 2


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [100, "One"], [-1, 5], [[1 << 32]]])
async def test_an_unusable_prompt_is_rejected(stage: Stage, prompt: Any) -> None:
    status, answer = await stage.client.post(COMPLETIONS, {"model": MODEL, "prompt": prompt})
    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert stage.router.requests == []


# --- conversations ---


async def test_the_next_turn_s_prompt_extends_the_last_one(stage: Stage) -> None:
    history = [{"role": "user", "content": "Hi"}]
    first, _ = await stage.complete(CHAT, {"model": MODEL, "messages": history}, "Hello.")
    history += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "More"}]
    stage.worker.works.clear()
    second, _ = await stage.complete(CHAT, {"model": MODEL, "messages": history}, "Sure.")
    assert tokens(second[0])[: len(tokens(first[0]))] == tokens(first[0])


@pytest.mark.parametrize(
    ("path", "image"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}),
        (
            MESSAGES,
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
            },
        ),
    ],
)
async def test_images_are_rejected_by_a_text_model(
    stage: Stage, path: str, image: dict[str, Any]
) -> None:
    content = [{"type": "text", "text": "Look"}, image]
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    status, answer = await stage.client.post(path, body)
    assert status == 400
    assert "does not read images" in answer["error"]["message"]


async def test_a_session_goes_on_after_an_image(stage: Stage) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    look = [{"type": "text", "text": "Look"}, {"type": "image", "source": source}]
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": look}]}
    assert (await stage.client.post(MESSAGES, body))[0] == 400
    body["messages"].append({"role": "user", "content": "Go on without it."})  # type: ignore[attr-defined]
    works, _ = await stage.complete(MESSAGES, body, "Sure.")
    assert tokens(works[0])
