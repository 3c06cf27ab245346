"""Answers of a real model do not depend on the cache, nor on the answers that a mesh remembers.

Recorded sessions of clients (`benchmarks/data`), whose prompts are cut to the model's context, and
a session whose calls return in other words. Each answer is compared with that to the same prompt,
token by token, in a namespace in which nothing is cached.
"""

import json
import os
import urllib.request
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agent_sessions import PLACEHOLDER, sessions
from support import forks
from support.frontend import attempt
from support.tap import Tap
from support.up import Up
from support.wait import PATIENCE_S

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 12
BLOCK = 16
CLIENTS = ["lang_chain-chat", "agents_sdk-responses", "pydantic_ai_agent-anthropic"]
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
CITIES = {"enum": ["Oslo", "Rome"]}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITIES, "days": {"enum": [1, 2]}, "far": {"type": "boolean"}},
    "required": ["city", "days", "far"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "strict": True, "parameters": PARAMETERS}
# With this a random model begins each answer with a call, and ends where it would begin another.
BEGINS = Tap().token("<tool_call>")
FREE = {"max_tokens": TOKENS, "tool_choice": "none"}
CALLS_ONCE = {"logit_bias": {str(BEGINS): 100}, "min_tokens": 1, "stop_token_ids": [BEGINS]}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder: Path = tmp_path_factory.mktemp("torch")
    model = str(folder / "tiny")
    assert forks.run(["model", "tiny", model], os.environ).returncode == 0
    flags = ["--engine", "torch", "--model", model, "--workers", "1", "--torch-threads", "1"]
    up = Up(folder, *flags, "--frontend-speculative-prefill", "off")
    up.start()
    yield up
    up.close()


@pytest_asyncio.fixture(loop_scope="module")
async def tap(up: Up) -> AsyncIterator[Tap]:
    await up.ready()
    async with Tap().listening(up.options) as tap:
        yield tap


def post(up: Up, path: str, body: dict[str, Any], tenant: str) -> tuple[str, dict[str, Any]]:
    """The mesh's id of a request, and the answer."""
    headers = {"Content-Type": "application/json", "x-tenant-id": tenant}
    request = urllib.request.Request(up.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.headers["request-id"], json.load(answer)


async def assert_as_without_cache(up: Up, tap: Tap, request: str) -> int:
    """Assert that a request's answer is that to its prompt without a cache; its cached tokens."""
    outcome = await tap.outcome_of(request)
    (work,) = (each for each in tap.works if attempt(each) == request)
    prompt = array("I", work.tokens).tolist()
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    again, _ = post(up, "/v1/completions", body, f"alone-{request}")
    assert (await tap.outcome_of(again)).cached_tokens == 0
    assert tap.generated[again] == tap.generated[request]
    return outcome.cached_tokens


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_recorded_session_has_the_answers_of_an_empty_cache(
    up: Up, tap: Tap, client: str
) -> None:
    (session,) = sessions([client])
    cached = []
    for recorded in session.requests:
        body = json.loads(PLACEHOLDER.sub("of-another-mesh", bytes(recorded.body).decode()))
        body |= {"model": "tiny", "temperature": 0, "stream": False}
        body |= {LIMITS[recorded.path.partition("?")[0]]: TOKENS}
        body.pop("stream_options", None)
        for tool in body["tools"]:
            tool.pop("strict", None)  # which would constrain this answer, and not the other one
        request, _ = post(up, recorded.path, body, client)
        cached.append(await assert_as_without_cache(up, tap, request))
    assert all(cached[1:])


async def test_a_call_returned_in_other_words_is_read_from_the_cache(up: Up, tap: Tap) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather? " * 20}]
    body = {
        "model": "tiny",
        "temperature": 0,
        "tools": [{"type": "function", "function": WEATHER}],
        "messages": messages,
    }
    for _ in range(3):
        calling = {**body, "max_tokens": 200, **CALLS_ONCE}
        called, answer = post(up, "/v1/chat/completions", calling, "words")
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed([*arguments.items()])), indent=1)
        messages.append({"role": "assistant", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "It rains."})
        request, answer = post(up, "/v1/chat/completions", {**body, **FREE}, "words")
        cached = await assert_as_without_cache(up, tap, request)
        before = await tap.outcome_of(called)
        assert cached >= (before.prompt_tokens + before.output_tokens - 1) // BLOCK * BLOCK
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        messages.append({"role": "user", "content": "And tomorrow?"})
