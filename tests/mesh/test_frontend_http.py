"""A frontend with API keys over HTTP: error shapes, headers and all endpoints but generation."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
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
    events,
    frontend_mesh,
    scripted_router,
    scripted_worker,
)
from support.mesh import Mesh, stream_env
from support.nats import NatsServer
from support.wait import eventually

from kvmesh.bus.messages import Chunk, Refused
from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.messages.api import TYPES as ANTHROPIC_TYPES
from kvmesh.frontend.errors import Kind

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_BODY = 300_000
KEYS: dict[str, dict[str, Any]] = {
    "plain": {"tenant": "team-a"},
    "other": {"tenant": "team-b"},
    "narrow": {"models": ["another"]},
    "tuned": {"models": ["tuned"]},
    "single": {"concurrency": 1},
    "cache": {"tenant": "team-a", "scopes": ["cache"]},
    "root": {"scopes": ["admin"]},
    **{f"slow-{api}": {"requests_per_minute": 1} for api in ("chat", "text", "msg", "resp")},
}
CHAT, TEXT, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    TEXT: {"prompt": "Hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
    RESPONSES: {"input": "Hello"},
}
SLOW = {CHAT: "slow-chat", TEXT: "slow-text", MESSAGES: "slow-msg", RESPONSES: "slow-resp"}
every_api = pytest.mark.parametrize("path", BODIES)


@dataclass
class Reply:
    status: int
    headers: Any
    body: Any


@dataclass
class Stage:
    """One frontend with keys, a router and a worker that follow the test."""

    mesh: Mesh
    client: Client
    router: ScriptedRouter
    worker: ScriptedWorker

    async def call(
        self, method: str, path: str, body: Any = None, key: str | None = "plain", **headers: str
    ) -> Reply:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body) if body else b""
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        async with self.client.session.request(
            method, self.client.url + path, data=data, headers=headers
        ) as response:
            return Reply(response.status, response.headers, await response.json())

    async def post(
        self, path: str, body: dict[str, Any], key: str | None = "plain", **headers: str
    ) -> Reply:
        return await self.call("POST", path, {"model": MODEL, **body}, key, **headers)

    async def generate(self, path: str, key: str = "plain", **changes: Any) -> Reply:
        """A request that the worker answers with "Good day"."""
        number = len(self.worker.works)
        sent = asyncio.create_task(self.post(path, {**BODIES[path], **changes}, key))
        work = await self.worker.work(number)
        await self.worker.send(work, Chunk(work.request, 0, ids("Good day"), finish="stop"))
        return await sent


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def keys_file() -> str:
    tables = []
    for name, fields in KEYS.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in fields.items()]
        tables.append("\n".join(["[[key]]", f'name = "{name}"', f'sha256 = "{digest}"', *lines]))
    return "\n".join(tables)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("http")
    file = folder / "keys.toml"
    file.write_text(keys_file())
    settings = {
        "KVMESH_FRONTEND_KEYS_FILE": str(file),
        "KVMESH_FRONTEND_MAX_BODY_BYTES": str(MAX_BODY),
        **stream_env(LIMITS),
    }
    async with (
        frontend_mesh(nats_server.url, folder, settings) as (mesh, bus),
        scripted_router(bus, LIMITS) as router,
        scripted_worker(bus, LIMITS, "a", adapters=["tuned"]) as worker,
        client_session() as session,
    ):
        stage = Stage(mesh, Client(mesh.url, session), router, worker)
        await mesh.ready()
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> Stage:
    shared.router.order = [shared.worker.instance]
    shared.router.refusal = None
    shared.worker.works.clear()
    shared.worker.controls.clear()
    shared.worker.status = "accepted"
    return shared


def check_error(path: str, reply: Reply, kind: Kind) -> None:
    """The error has the shape, type and status of the API."""
    error = reply.body["error"]
    assert error["message"]
    if path.startswith(MESSAGES):
        assert reply.body["type"] == "error"
        assert error["type"] == ANTHROPIC_TYPES[kind]
        assert re.fullmatch("(msg|req)_[0-9a-f]{24}", reply.body["request_id"])
        assert set(error) == {"type", "message"}
    else:
        assert error["type"] == openai.TYPES[kind]
        assert set(error) == {"message", "type", "param", "code"}


# --- errors of generation, in every API ---

REFUSED: list[tuple[Kind, dict[str, Any], str | None, int]] = [
    ("invalid_request", {"temperature": 9}, "plain", 400),
    ("invalid_request", {"temperature": "hot"}, "plain", 400),
    ("invalid_request", {"nvext": {"dp_rank": -1}}, "plain", 400),
    ("authentication", {}, None, 401),
    ("authentication", {}, "unknown", 401),
    ("permission", {}, "narrow", 403),
    ("permission", {"nvext": {"policy": "random"}}, "plain", 403),
    ("not_found", {"model": "none"}, "plain", 404),
    ("too_large", {"padding": "x" * MAX_BODY}, "plain", 413),
]


@every_api
@pytest.mark.parametrize(("kind", "changes", "key", "status"), REFUSED)
async def test_a_refused_request_has_the_api_s_error(
    stage: Stage, path: str, kind: Kind, changes: dict[str, Any], key: str | None, status: int
) -> None:
    reply = await stage.post(path, {**BODIES[path], **changes}, key)
    assert reply.status == status
    check_error(path, reply, kind)
    assert "Retry-After" not in reply.headers
    assert not stage.router.requests or not stage.worker.works


FAILURES: list[tuple[Kind, str, float, int, int]] = [
    ("overloaded", "overloaded", 7.0, 429, 529),
    ("unavailable", "no_workers", 3.4, 503, 503),
    ("timeout", "deadline", 0.2, 504, 504),
]


@every_api
@pytest.mark.parametrize(("kind", "code", "after", "status", "anthropic"), FAILURES)
async def test_a_router_s_refusal_says_when_to_retry(
    stage: Stage, path: str, kind: Kind, code: str, after: float, status: int, anthropic: int
) -> None:
    unmet = code == "no_workers"  # answered at once, without waiting for a worker
    stage.router.refusal = Refused(code=code, reason="not now", retry_after_s=after, unmet=unmet)
    reply = await stage.post(path, BODIES[path])
    assert reply.status == (anthropic if path == MESSAGES else status)
    check_error(path, reply, kind)
    assert reply.headers["Retry-After"] == str(max(1, round(after)))
    assert "X-Should-Retry" not in reply.headers


@every_api
async def test_a_rate_limit_says_when_to_retry(stage: Stage, path: str) -> None:
    await stage.generate(path, SLOW[path])
    reply = await stage.post(path, BODIES[path], SLOW[path])
    assert reply.status == 429
    check_error(path, reply, "rate_limit")
    assert 50 <= int(reply.headers["Retry-After"]) <= 60


@every_api
async def test_an_engine_s_failure_is_an_internal_error(stage: Stage, path: str) -> None:
    sent = asyncio.create_task(stage.post(path, BODIES[path]))
    work = await stage.worker.work()
    await stage.worker.send(work, Chunk(work.request, 0, [], finish="error", error="it broke"))
    reply = await sent
    assert reply.status == 500
    check_error(path, reply, "internal")
    assert "it broke" in reply.body["error"]["message"]


@every_api
async def test_an_error_before_the_first_frame_of_a_stream_is_a_plain_response(
    stage: Stage, path: str
) -> None:
    stage.router.refusal = Refused(code="invalid", reason="no such policy")
    reply = await stage.post(path, {**BODIES[path], "stream": True})
    assert reply.status == 400
    assert reply.headers["Content-Type"].startswith("application/json")
    check_error(path, reply, "invalid_request")


async def test_an_anthropic_header_chooses_the_error_shape(stage: Stage) -> None:
    reply = await stage.call("GET", "/v1/models/none", **{"anthropic-version": "2023-06-01"})
    assert (reply.status, reply.body["error"]["type"]) == (404, "not_found_error")
    reply = await stage.call("GET", "/v1/models/none")
    assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")


# --- headers and ids of answers ---


@every_api
async def test_the_header_of_a_whole_answer_is_its_id(stage: Stage, path: str) -> None:
    reply = await stage.generate(path, store=False)
    assert reply.status == 200
    assert reply.headers["X-Request-Id"] == reply.body["id"]


@every_api
async def test_the_header_of_a_stream_is_its_id(stage: Stage, path: str) -> None:
    body = {"model": MODEL, **BODIES[path], "stream": True, "store": False}
    sent = asyncio.create_task(stage.client.stream(path, body, Authorization="Bearer plain"))
    work = await stage.worker.work()
    await stage.worker.send(work, Chunk(work.request, 0, ids("Good day"), finish="stop"))
    response = await sent
    text = msgspec.json.encode(await events(response)).decode()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert f'"id":"{response.headers["X-Request-Id"]}"' in text


async def test_a_choice_beyond_the_key_s_concurrency_is_refused(stage: Stage) -> None:
    reply = await stage.post(CHAT, {**BODIES[CHAT], "n": 2}, "single")
    assert (reply.status, reply.body["error"]["code"]) == (403, "concurrency_exceeded")
    assert (await stage.generate(CHAT, "single")).status == 200, "the refused request has left"


# --- counting and tokens ---

COUNTING: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/messages/count_tokens": ({"messages": HELLO}, "input_tokens"),
    "/v1/responses/input_tokens": ({"input": "Hello"}, "input_tokens"),
    "/v1/tokenize": ({"messages": HELLO}, "count"),
}


@pytest.mark.parametrize("path", COUNTING)
async def test_the_count_is_that_of_the_request_s_prompt(stage: Stage, path: str) -> None:
    body, field = COUNTING[path]
    reply = await stage.post(path, body)
    assert reply.status == 200
    asked = MESSAGES if "messages" in path else RESPONSES if "responses" in path else CHAT
    await stage.generate(asked, store=False)
    assert reply.body[field] == len(stage.worker.works[0].tokens) // 4


@pytest.mark.parametrize("path", COUNTING)
@pytest.mark.parametrize(
    ("changes", "key", "kind", "status"),
    [
        ({"model": "none"}, "plain", "not_found", 404),
        ({}, "narrow", "permission", 403),
        ({}, None, "authentication", 401),
        ({"messages": 3, "input": 3}, "plain", "invalid_request", 400),
        ({"padding": "x" * MAX_BODY}, "plain", "too_large", 413),
    ],
)
async def test_errors_of_counting_have_the_api_s_shape(
    stage: Stage, path: str, changes: dict[str, Any], key: str | None, kind: Kind, status: int
) -> None:
    reply = await stage.post(path, {**COUNTING[path][0], **changes}, key)
    assert reply.status == status
    check_error(path, reply, kind)


@pytest.mark.parametrize("text", ["Hi 🧿", "", "<|im_start|>", "word " * 1500])
async def test_tokens_and_text_convert_both_ways(stage: Stage, text: str) -> None:
    made = await stage.post("/v1/tokenize", {"prompt": text})
    assert made.body["tokens"] == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert (made.body["count"], made.body["max_model_len"]) == (len(made.body["tokens"]), CONTEXT)
    back = await stage.post("/v1/detokenize", {"tokens": made.body["tokens"]})
    assert (back.status, back.body) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "param"),
    [
        ("/v1/tokenize", {}, "plain", 400, "prompt"),
        ("/v1/detokenize", {}, "plain", 400, "tokens"),
        ("/v1/detokenize", {"tokens": [-1]}, "plain", 400, "tokens"),
        ("/v1/detokenize", {"tokens": [1 << 64]}, "plain", 400, "tokens"),
        ("/v1/detokenize", {"tokens": [TOKENIZER.get_vocab_size()]}, "plain", 400, "tokens"),
        ("/v1/detokenize", {"tokens": [1] * (CONTEXT + 1)}, "plain", 400, None),
        ("/v1/detokenize", {"tokens": [1], "model": "none"}, "plain", 404, "model"),
        ("/v1/detokenize", {"tokens": [1]}, "narrow", 403, "model"),
        ("/v1/detokenize", {"tokens": [1]}, None, 401, None),
    ],
)
async def test_a_bad_request_for_tokens_is_refused(
    stage: Stage, path: str, body: dict[str, Any], key: str | None, status: int, param: str | None
) -> None:
    reply = await stage.post(path, body, key)
    assert (reply.status, reply.body["error"]["param"]) == (status, param)


# --- models, health, metrics ---


@pytest.mark.parametrize(
    ("key", "names"), [("plain", [MODEL, "tuned"]), ("tuned", ["tuned"]), ("narrow", [])]
)
async def test_a_key_sees_the_models_that_it_may_use(
    stage: Stage, key: str, names: list[str]
) -> None:
    reply = await stage.call("GET", "/v1/models", key=key)
    assert [entry["id"] for entry in reply.body["data"]] == names
    assert reply.body["has_more"] is False
    assert ("first_id" in reply.body) == bool(names)
    for name in (MODEL, "tuned"):
        one = await stage.call("GET", f"/v1/models/{name}", key=key)
        assert one.status == (200 if name in names else 404)
        if name in names:
            assert (one.body["id"], one.body["root"]) == (name, MODEL)
            lengths = ("context_length", "context_window", "max_model_len")
            assert {one.body[length] for length in lengths} == {CONTEXT}


async def test_models_come_in_pages(stage: Stage) -> None:
    for query, names, more in (
        ("limit=1", [MODEL], True),
        (f"limit=1&after_id={MODEL}", ["tuned"], False),
        ("before_id=tuned", [MODEL], False),
    ):
        reply = await stage.call("GET", f"/v1/models?{query}", key="plain")
        assert [entry["id"] for entry in reply.body["data"]] == names, query
        assert reply.body["has_more"] is more, query
    for query in ("limit=0", "limit=1001", "limit=many", "after_id=nothing"):
        assert (await stage.call("GET", f"/v1/models?{query}", key="plain")).status == 400, query


async def test_models_need_a_key_and_health_does_not(stage: Stage) -> None:
    assert (await stage.call("GET", "/v1/models", key=None)).status == 401
    assert (await stage.call("GET", "/live", key=None)).body == {"status": "live"}
    assert (await stage.call("GET", "/health", key=None)).body == {"status": "healthy"}


@pytest.mark.parametrize(("key", "status"), [("root", 200), ("plain", 403), (None, 401)])
async def test_metrics_are_for_admins(stage: Stage, key: str | None, status: int) -> None:
    headers = {} if key is None else {"x-api-key": key}
    url = f"{stage.client.url}/metrics"
    async with stage.client.session.get(url, headers=headers) as response:
        text = await response.text()
        assert response.status == status
    assert ("kvmesh_frontend_active_requests" in text) == (status == 200)


async def test_requests_are_counted_by_api_model_and_status(stage: Stage) -> None:
    before = await samples(stage)
    await stage.post(CHAT, {**BODIES[CHAT], "model": "invented"})
    await stage.post(CHAT, {**BODIES[CHAT], "temperature": 9})
    await stage.generate(MESSAGES)

    async def counted() -> bool:
        after = await samples(stage)
        grown = {key for key, count in after.items() if count > before.get(key, 0)}
        labels = {
            'api="chat",model="",status="404"',
            'api="chat",model="",status="400"',
            f'api="messages",model="{MODEL}",status="200"',
        }
        return {f"kvmesh_frontend_requests_total{{{label}}}" for label in labels} <= grown

    await eventually(counted)


async def samples(stage: Stage) -> dict[str, float]:
    url, headers = f"{stage.client.url}/metrics", {"x-api-key": "root"}
    async with stage.client.session.get(url, headers=headers) as response:
        lines = (await response.text()).splitlines()
    parts = (line.rpartition(" ") for line in lines if line.startswith("kvmesh_frontend_requests"))
    return {name: float(value) for name, _, value in parts}


# --- stored responses ---


async def test_a_stored_response_is_read_listed_and_deleted(stage: Stage) -> None:
    first = (await stage.generate(RESPONSES, input="One")).body
    second = (await stage.generate(RESPONSES, input="Two", previous_response_id=first["id"])).body
    sent = {"input": "Two", "previous_response_id": first["id"]}
    counted = await stage.post(f"{RESPONSES}/input_tokens", sent)
    assert counted.body["input_tokens"] == second["usage"]["input_tokens"]
    path = f"{RESPONSES}/{second['id']}"
    assert (await stage.call("GET", path)).body == second
    items = (await stage.call("GET", f"{path}/input_items?order=asc")).body
    assert items["object"] == "list"
    said = [first["output"][0]["content"][0]["text"]]
    assert [item["content"][0]["text"] for item in items["data"]] == ["One", *said, "Two"]
    assert items["data"][1] == first["output"][0], "earlier answers are input"
    newest = (await stage.call("GET", f"{path}/input_items?limit=1")).body
    assert (newest["data"], newest["has_more"]) == (items["data"][-1:], True)
    rest = (await stage.call("GET", f"{path}/input_items?after={newest['last_id']}")).body
    assert (rest["data"], rest["has_more"]) == (items["data"][-2::-1], False)
    again = await stage.generate(RESPONSES, input=references({"output": items["data"]}))
    assert again.body["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    refused = await stage.call("GET", f"{path}/input_items?order=up")
    assert (refused.status, refused.body["error"]["param"]) == (400, "order")
    refused = await stage.call("GET", f"{path}?stream=true")
    assert (refused.status, refused.body["error"]["param"]) == (400, "stream")
    deleted = await stage.call("DELETE", path)
    assert deleted.body == {"id": second["id"], "object": "response", "deleted": True}
    for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        reply = await stage.call(method, path + suffix)
        assert reply.status == 404
        check_error(path, reply, "not_found")
    assert (await stage.call("GET", f"{RESPONSES}/{first['id']}")).status == 200


@pytest.mark.parametrize("key", ["other", None])
async def test_a_stored_response_is_for_its_tenant_alone(stage: Stage, key: str | None) -> None:
    made = (await stage.generate(RESPONSES)).body
    reply = await stage.call("GET", f"{RESPONSES}/{made['id']}", key=key)
    assert reply.status == (401 if key is None else 404)


async def test_a_response_that_is_not_to_be_stored_is_not(stage: Stage) -> None:
    made = (await stage.generate(RESPONSES, store=False)).body
    assert made["store"] is False
    assert (await stage.call("GET", f"{RESPONSES}/{made['id']}")).status == 404
    reply = await stage.post(RESPONSES, {"input": references(made)})
    assert (reply.status, reply.body["error"]["param"]) == (400, "input")
    assert "was not stored" in reply.body["error"]["message"]


@pytest.mark.parametrize("name", ["resp_none", "chatcmpl-1", "resp_" + "x" * 200, "resp_%2e%2e"])
async def test_an_unknown_previous_response_is_named(stage: Stage, name: str) -> None:
    reply = await stage.post(RESPONSES, {"input": "Hi", "previous_response_id": name})
    error = reply.body["error"]
    assert (reply.status, error["param"]) == (400, "previous_response_id")
    assert error["code"] == "previous_response_not_found"
    assert (await stage.call("GET", f"{RESPONSES}/{name}")).status == 404


def references(response: Any) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in response["output"]]


async def test_referenced_items_are_read_from_stored_responses(stage: Stage) -> None:
    one, two = {"role": "user", "content": "One"}, {"role": "user", "content": "Two"}
    first = (await stage.generate(RESPONSES, input=[one])).body
    second = (await stage.generate(RESPONSES, input=[two])).body
    sent = [one, *references(first), two, *references(second), one]
    whole = [one, *first["output"], two, *second["output"], one]
    made = await stage.generate(RESPONSES, input=sent)
    same = await stage.generate(RESPONSES, input=whole)
    assert made.body["usage"]["input_tokens"] == same.body["usage"]["input_tokens"]
    assert [w.tokens for w in stage.worker.works[-2:-1]] == [
        w.tokens for w in stage.worker.works[-1:]
    ]
    counted = await stage.post(f"{RESPONSES}/input_tokens", {"input": sent})
    assert counted.body["input_tokens"] == made.body["usage"]["input_tokens"]
    then = await stage.generate(
        RESPONSES, input=[*references(first), two], previous_response_id=made.body["id"]
    )
    assert then.body["usage"]["input_tokens"] > made.body["usage"]["input_tokens"]
    path = f"{RESPONSES}/{made.body['id']}/input_items?order=asc"
    listed = (await stage.call("GET", path)).body["data"]
    assert [item["id"] for item in listed if item["role"] == "assistant"] == [
        item["id"] for response in (first, second) for item in response["output"]
    ]


async def test_items_of_others_and_deleted_items_are_not_found(stage: Stage) -> None:
    made = (await stage.generate(RESPONSES)).body
    (name,) = (item["id"] for item in made["output"])
    sent = {"input": references(made)}
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        reply = await stage.post(path, sent, key="other")
        assert reply.status == 400
        assert name in reply.body["error"]["message"]
    await stage.call("DELETE", f"{RESPONSES}/{made['id']}")
    reply = await stage.post(RESPONSES, sent)
    assert (reply.status, reply.body["error"]["param"]) == (400, "input")
    assert name in reply.body["error"]["message"]


@pytest.mark.parametrize("name", ["rs_00", "msg_" + "0" * 26, "resp_x", "x" * 5000, "fc_>.*"])
@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/input_tokens"])
async def test_an_unknown_item_is_named(stage: Stage, name: str, path: str) -> None:
    reply = await stage.post(path, {"input": [{"type": "item_reference", "id": name}]})
    assert reply.status == 400
    check_error(path, reply, "invalid_request")
    assert name in reply.body["error"]["message"]


async def test_a_prompt_to_cache_has_no_references(stage: Stage) -> None:
    items = [{"type": "item_reference", "id": "rs_00"}]
    reply = await stage.post("/v1/prefetch", {"input": items}, key="root")
    assert (reply.status, reply.body["error"]["param"]) == (400, "input")


async def test_the_responses_that_a_request_refers_to_are_bounded(stage: Stage) -> None:
    items = [{"type": "item_reference", "id": f"msg_{n:024x}00"} for n in range(1001)]
    reply = await stage.post(RESPONSES, {"input": items})
    assert reply.status == 400
    assert "1000" in reply.body["error"]["message"]


async def test_context_edits_shorten_the_prompt_and_are_reported(stage: Stage) -> None:
    uses = [
        (
            {"type": "tool_use", "id": f"c{n}", "name": "read", "input": {"n": n}},
            {"type": "tool_result", "tool_use_id": f"c{n}", "content": "many words " * 40},
        )
        for n in range(5)
    ]
    messages: list[Any] = [{"role": "user", "content": "Read"}]
    messages += [
        {"role": role, "content": [block]}
        for pair in uses
        for role, block in zip(("assistant", "user"), pair, strict=True)
    ]
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 4},
        "keep": {"type": "tool_uses", "value": 2},
    }
    fields: dict[str, Any] = {"messages": messages, "context_management": {"edits": [edit]}}
    counted = (await stage.post("/v1/messages/count_tokens", fields)).body
    made = (await stage.generate("/v1/messages", **fields)).body
    original = counted["context_management"]["original_input_tokens"]
    (applied,) = made["context_management"]["applied_edits"]
    assert applied == {
        "type": "clear_tool_uses_20250919",
        "cleared_tool_uses": 3,
        "cleared_input_tokens": original - counted["input_tokens"],
    }
    usage = made["usage"]
    spent = sum(usage[name] for name in usage if name.endswith("input_tokens"))
    assert spent == counted["input_tokens"] < original


# --- validation of the cache endpoints ---

TOKENS = list(range(300, 332))
BAD_CACHE_BODIES: list[tuple[str, str, dict[str, Any], int, str | None]] = [
    ("POST", "/v1/prefetch", {"tokens": []}, 400, "tokens"),
    ("POST", "/v1/prefetch", {"tokens": [-1]}, 400, "tokens[0]"),
    ("POST", "/v1/prefetch", {"tokens": TOKENS, "compute": -1}, 400, "compute"),
    ("POST", "/v1/prefetch", {"tokens": TOKENS, "deadline": 7200}, 400, "deadline"),
    ("POST", "/v1/prefetch", {"tokens": TOKENS, "session": "s"}, 400, "tokens"),
    ("POST", "/v1/prefetch", {"tokens": TOKENS, "model": "none"}, 404, "model"),
    ("POST", "/v1/cache/pins", {"tokens": TOKENS, "ttl": 0}, 400, "ttl"),
    ("POST", "/v1/cache/pins", {"tokens": TOKENS, "ttl": "2d"}, 400, "ttl"),
    ("POST", "/v1/cache/pins", {"tokens": TOKENS, "ttl": "soon"}, 400, "ttl"),
    ("POST", "/v1/cache/pins", {"tokens": TOKENS, "priority": 101}, 400, "priority"),
    ("POST", "/v1/cache/pins", {"tokens": TOKENS, "id": ""}, 400, "id"),
    ("POST", "/v1/cache/pins", {"messages": HELLO, "api": "speech"}, 400, "api"),
    ("DELETE", "/v1/cache/pins", {}, 400, "session"),
    ("DELETE", "/v1/cache/pins", {"id": "none"}, 404, None),
    ("DELETE", "/v1/cache/pins/none", {}, 404, None),
    ("DELETE", "/v1/prefetch/none", {}, 404, None),
    ("DELETE", "/v1/prefetch/pf_1.a", {}, 404, None),
    ("POST", "/v1/cache/clear", {"tiers": [4]}, 400, "tiers[0]"),
    ("POST", "/v1/cache/clear", {"tier": 1}, 400, None),
    ("POST", "/v1/cache/clear", {"all_tenants": True}, 403, None),
    ("POST", "/v1/sessions/release", {}, 400, "sessions"),
    ("POST", "/v1/sessions/release", {"sessions": []}, 400, "sessions"),
    ("POST", "/v1/sessions/release", {"sessions": ["s"], "reason": "bored"}, 400, "reason"),
    ("POST", "/v1/sessions/release", {"sessions": ["x" * 513]}, 400, "sessions[0]"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "param"), BAD_CACHE_BODIES)
async def test_a_bad_cache_request_is_refused(
    stage: Stage, method: str, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    reply = await stage.call(method, path, {"model": MODEL, **body}, "cache")
    assert (reply.status, reply.body["error"]["param"]) == (status, param)
    kinds: dict[int, Kind] = {400: "invalid_request", 403: "permission", 404: "not_found"}
    check_error(path, reply, kinds[status])
    assert not stage.worker.controls, "no command was sent"


@pytest.mark.parametrize("sent", [b"", b"[]", b"{", b'{"model": "\xff"}'])
@pytest.mark.parametrize(
    "path", ["/v1/prefetch", "/v1/cache/pins", "/v1/cache/clear", "/v1/sessions/release"]
)
async def test_a_cache_request_that_is_no_object_is_refused(
    stage: Stage, path: str, sent: bytes
) -> None:
    reply = await stage.call("POST", path, sent, "cache")
    assert reply.status == 400
    check_error(path, reply, "invalid_request")


async def test_a_large_prompt_of_a_cache_request_is_parsed_in_a_thread(stage: Stage) -> None:
    text = "word " * 30_000
    reply = await stage.post("/v1/cache/pins", {"prompt": text, "api": "completions"}, "cache")
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")


async def test_the_scope_is_checked_before_the_body(stage: Stage) -> None:
    reply = await stage.call("POST", "/v1/cache/clear", b"{", "plain")
    assert (reply.status, reply.body["error"]["code"]) == (403, "scope_missing")


async def test_a_connection_serves_the_request_after_a_refused_one(stage: Stage) -> None:
    headers = {"Authorization": "Bearer plain"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for _ in range(3):
            async with session.post(stage.client.url + CHAT, data=b"{") as response:
                assert response.status == 400
            async with session.get(f"{stage.client.url}/v1/models") as response:
                assert response.status == 200
