"""Sampling fields of every API as the worker receives them; limits, choices, log-probabilities."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from support.apis import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Api,
    every_api,
    streamed,
)
from support.frontend import (
    CONTEXT,
    LIMITS,
    TOKENIZER,
    Client,
    ScriptedRouter,
    ScriptedWorker,
    client_session,
    events,
    frontend_mesh,
    ids,
    scripted_router,
    scripted_worker,
)
from support.nats import NatsServer

from kvmesh.bus.messages import Chunk, Guided, Sampling, Work

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "Say something."
Json = dict[str, Any]


@dataclass
class Stage:
    """One frontend with a scripted router and a scripted worker."""

    client: Client
    router: ScriptedRouter
    worker: ScriptedWorker

    async def works(self, api: Api, body: Json, count: int = 1) -> list[Work]:
        """Works of a request with `count` choices, which are answered in one token."""
        first = len(self.worker.works)
        response = asyncio.create_task(self.client.post(api.path, body))
        works = [await self.worker.work(first + number) for number in range(count)]
        for work in works:
            await self.worker.send(work, Chunk(work.request, 0, ids("Yes"), finish="stop"))
        status, answer = await response
        assert status == 200, answer
        return works

    async def sampling(self, api: Api, body: Json) -> Sampling:
        (work,) = await self.works(api, body)
        return work.sampling


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with (
        frontend_mesh(nats_server.url, tmp_path_factory.mktemp("sampling")) as (mesh, bus),
        scripted_router(bus, LIMITS) as router,
        scripted_worker(bus, LIMITS, "a", reasoning_parser="none") as worker,
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


# --- fields ---

OPENAI: list[tuple[Json, Json]] = [
    ({"temperature": 0.25}, {"temperature": 0.25}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 40}, {"top_k": 40}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"presence_penalty": -1.5}, {"presence_penalty": -1.5}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"repetition_penalty": 1.25}, {"repetition_penalty": 1.25}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"seed": 0}, {"seed": 0}),
    ({"seed": -12}, {"seed": -12}),
    ({"stop": "end"}, {"stop": ["end"]}),
    ({"stop": ["a", "", "b"]}, {"stop": ["a", "b"]}),
    ({"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6]}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"logit_bias": {"17": -100, "18": 2.5}}, {"logit_bias": {17: -100.0, 18: 2.5}}),
    ({"response_format": {"type": "text"}}, {}),
    (
        {"response_format": {"type": "json_object"}},
        {"guided": Guided(kind="json_object", value="")},
    ),
    ({"nvext": {"greed_sampling": True}, "temperature": 0.7}, {"temperature": 0.0}),
    ({"temperature": None, "top_p": None, "stop": None, "seed": None}, {}),
]


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS], ids=lambda api: api.name)
@pytest.mark.parametrize(("fields", "expected"), OPENAI)
async def test_a_field_of_the_openai_apis_reaches_the_worker(
    stage: Stage, api: Api, fields: Json, expected: Json
) -> None:
    sampling = await stage.sampling(api, api.body(TEXT, 9, **fields))
    assert sampling == Sampling(max_tokens=9, **expected)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
OTHERS: list[tuple[Api, Json, Json]] = [
    (MESSAGES, {"temperature": 0.25}, {"temperature": 0.25}),
    (MESSAGES, {"top_p": 0.5}, {"top_p": 0.5}),
    (MESSAGES, {"top_k": 40}, {"top_k": 40}),
    (MESSAGES, {"stop_sequences": ["a", "", "b"]}, {"stop": ["a", "b"]}),
    (MESSAGES, {"nvext": {"greed_sampling": True}}, {"temperature": 0.0}),
    (MESSAGES, {"seed": 3, "presence_penalty": 1}, {}),
    (
        MESSAGES,
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"guided": Guided(kind="json_schema", value=SCHEMA_TEXT)},
    ),
    (RESPONSES, {"temperature": 0.25}, {"temperature": 0.25}),
    (RESPONSES, {"top_p": 0.5}, {"top_p": 0.5}),
    (RESPONSES, {"top_logprobs": 3}, {"logprobs": 3}),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
    (RESPONSES, {"nvext": {"greed_sampling": True}}, {"temperature": 0.0}),
    (RESPONSES, {"seed": 3, "presence_penalty": 1}, {}),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        {"guided": Guided(kind="json_schema", value=SCHEMA_TEXT)},
    ),
    (CHAT, {"logprobs": True}, {"logprobs": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    (COMPLETIONS, {"logprobs": 2}, {"logprobs": 2}),
    (COMPLETIONS, {"logprobs": 0}, {"logprobs": 0}),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"guided": Guided(kind="json_schema", value=SCHEMA_TEXT)},
    ),
]


@pytest.mark.parametrize(("api", "fields", "expected"), OTHERS)
async def test_a_field_of_one_api_reaches_the_worker(
    stage: Stage, api: Api, fields: Json, expected: Json
) -> None:
    sampling = await stage.sampling(api, api.body(TEXT, 9, **fields))
    assert sampling == Sampling(max_tokens=9, **expected)


BEYOND = 1 << 30  # no vocabulary has as many tokens
INVALID: list[tuple[Api, Json, str]] = [
    *[
        (api, {field: value}, field)
        for api in (CHAT, COMPLETIONS)
        for field, value in (
            ("top_p", 1.5),
            ("top_k", -2),
            ("min_p", -0.1),
            ("presence_penalty", 3),
            ("frequency_penalty", -3),
            ("repetition_penalty", 11),
            ("logit_bias", {"x": 1}),
            ("logit_bias", {"1": 101}),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", [5, BEYOND]),
            ("logit_bias", {str(BEYOND): 1}),
            ("n", 0),
        )
    ],
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": False, "top_logprobs": 4}, "top_logprobs"),
    (CHAT, {"top_logprobs": 1}, "top_logprobs"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": [1, BEYOND]}, "prompt"),
    (MESSAGES, {"top_p": -1}, "top_p"),
    (MESSAGES, {"top_k": -2}, "top_k"),
    (MESSAGES, {"stop_sequences": ["x"] * 65}, "stop_sequences"),
    (RESPONSES, {"top_p": 2}, "top_p"),
    (RESPONSES, {"top_logprobs": 21}, "top_logprobs"),
]


@pytest.mark.parametrize(("api", "fields", "named"), INVALID)
async def test_an_invalid_field_is_named(stage: Stage, api: Api, fields: Json, named: str) -> None:
    status, answer = await stage.client.post(api.path, api.body(TEXT, 9, **fields))
    assert status == 400
    assert named in answer["error"]["message"]
    if api is not MESSAGES:
        assert answer["error"]["param"] == named
    assert not stage.router.requests


# --- limits ---


@every_api
async def test_without_a_limit_the_api_s_default_applies(stage: Stage, api: Api) -> None:
    (work,) = await stage.works(api, api.body(TEXT))
    rest = CONTEXT - len(work.tokens) // 4
    assert work.sampling.max_tokens == (16 if api is COMPLETIONS else rest)
    assert stage.router.requests[-1].max_tokens == work.sampling.max_tokens


async def test_max_completion_tokens_takes_precedence(stage: Stage) -> None:
    sampling = await stage.sampling(CHAT, CHAT.body(TEXT, 9, max_completion_tokens=5))
    assert sampling.max_tokens == 5


@every_api
@streamed
async def test_an_output_cut_at_its_limit_says_so(stage: Stage, api: Api, stream: bool) -> None:
    response = asyncio.create_task(api.send(stage.client, api.body(TEXT, 2, stream=stream)))
    work = await stage.worker.work()
    await stage.worker.send(work, Chunk(work.request, 0, ids("Yes yes")[:2], finish="length"))
    content = await response
    reasons = {MESSAGES: "max_tokens", RESPONSES: "incomplete"}
    assert content.finish == reasons.get(api, "length")
    assert (content.text, content.output) == ("Yes yes", 2)


# --- choices ---


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS], ids=lambda api: api.name)
@pytest.mark.parametrize("seed", [None, 40])
async def test_each_choice_has_a_seed_of_its_own(stage: Stage, api: Api, seed: int | None) -> None:
    works = await stage.works(api, api.body(TEXT, 9, n=3, seed=seed), 3)
    seeds = sorted(work.sampling.seed or 0 for work in works)
    assert seeds == ([0, 0, 0] if seed is None else [40, 41, 42])
    assert len({work.request for work in works}) == 3
    assert len({work.tokens for work in works}) == 1


@streamed
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS], ids=lambda api: api.name)
async def test_choices_are_told_apart_by_their_index(stage: Stage, api: Api, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = api.body(TEXT, 9, n=2, seed=0, stream=stream, **options)
    response = asyncio.create_task(stage.client.stream(api.path, body))
    works = [await stage.worker.work(number) for number in range(2)]
    texts_sent = {0: "Zero of two", 1: "One"}
    for work in works:
        tokens = ids(texts_sent[work.sampling.seed or 0])
        await stage.worker.send(work, Chunk(work.request, 0, tokens, cached=[16], finish="stop"))
    answer = await response
    found: dict[int, str] = {}
    if stream:
        chunks = [chunk for chunk in await events(answer) if chunk != "[DONE]"]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            text = choice["delta"].get("content") if api is CHAT else choice["text"]
            found[choice["index"]] = found.get(choice["index"], "") + (text or "")
        usage = chunks[-1]["usage"]
    else:
        whole = await answer.json()
        for choice in whole["choices"]:
            found[choice["index"]] = choice["message"]["content"] if api is CHAT else choice["text"]
        usage = whole["usage"]
    assert found == texts_sent
    assert usage["completion_tokens"] == sum(len(ids(text)) for text in texts_sent.values())
    assert usage["prompt_tokens"] == len(works[0].tokens) // 4


# --- log-probabilities ---

SAID = ids("Yes, of course")
OTHER = ids("Never")[0]
PROBABILITIES = [{token: -0.5 - at, OTHER: -2.5} for at, token in enumerate(SAID)]


def word(token: int) -> str:
    return str(TOKENIZER.decode([token]))


async def logprobs_of(stage: Stage, api: Api, fields: Json, stream: bool) -> Any:
    """The log-probabilities of a response to SAID: one object of the API, or those of a stream."""
    body = api.body(TEXT, 9, stream=stream, **fields)
    response = asyncio.create_task(stage.client.stream(api.path, body))
    work = await stage.worker.work()
    for at, token in enumerate(SAID):
        chunk = Chunk(work.request, at, [token], logprobs=[PROBABILITIES[at]])
        chunk.finish = "stop" if at == len(SAID) - 1 else None
        await stage.worker.send(work, chunk)
    answer = await response
    assert answer.status == 200
    if not stream:
        return await answer.json()
    return [event for event in await events(answer) if event != "[DONE]"]


def check_tokens(found: list[Json]) -> None:
    assert [entry["token"] for entry in found] == [word(token) for token in SAID]
    assert [entry["logprob"] for entry in found] == [-0.5 - at for at in range(len(SAID))]
    for at, entry in enumerate(found):
        assert bytes(entry["bytes"]).decode() == entry["token"]
        tops = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
        assert tops == {word(SAID[at]): -0.5 - at, word(OTHER): -2.5}
        assert sorted(tops.values(), reverse=True) == list(tops.values())


@streamed
async def test_chat_returns_log_probabilities(stage: Stage, stream: bool) -> None:
    answer = await logprobs_of(stage, CHAT, {"logprobs": True, "top_logprobs": 2}, stream)
    if stream:
        choices = [choice for chunk in answer for choice in chunk["choices"]]
        parts = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
        check_tokens([entry for part in parts for entry in part])
    else:
        check_tokens(answer["choices"][0]["logprobs"]["content"])


@streamed
async def test_completions_return_log_probabilities(stage: Stage, stream: bool) -> None:
    answer = await logprobs_of(stage, COMPLETIONS, {"logprobs": 2}, stream)
    found: dict[str, list[Any]] = {}
    for chunk in answer if stream else [answer]:
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                found.setdefault(name, []).extend(values)
    words = [word(token) for token in SAID]
    assert found["tokens"] == words
    assert found["token_logprobs"] == [-0.5 - at for at in range(len(SAID))]
    assert found["text_offset"] == [len("".join(words[:at])) for at in range(len(words))]
    assert found["top_logprobs"][0] == {words[0]: -0.5, word(OTHER): -2.5}


@streamed
async def test_responses_return_log_probabilities(stage: Stage, stream: bool) -> None:
    answer = await logprobs_of(stage, RESPONSES, {"top_logprobs": 2}, stream)
    whole = answer[-1]["response"] if stream else answer
    (item,) = whole["output"]
    check_tokens(item["content"][0]["logprobs"])
    if stream:
        deltas = [e for e in answer if e["type"] == "response.output_text.delta"]
        check_tokens([entry for event in deltas for entry in event["logprobs"]])


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES], ids=lambda api: api.name)
async def test_without_the_field_there_are_none(stage: Stage, api: Api) -> None:
    answer = await logprobs_of(stage, api, {}, False)
    if api is RESPONSES:
        assert answer["output"][0]["content"][0]["logprobs"] == []
    else:
        assert answer["choices"][0]["logprobs"] is None
