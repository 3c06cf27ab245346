"""The API surfaces, without any network: bodies in, frames out."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.apis.base import AnswerSummary, Api, Ending, Renderer, Usage
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.completions import Completions
from kvmesh.frontend.apis.messages.api import CountTokens, Messages
from kvmesh.frontend.apis.responses.api import InputTokens, Responses
from kvmesh.frontend.apis.responses.sealed_reasoning import open_sealed, seal
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.conversation import (
    AnswerEvent,
    Image,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolResult,
)
from kvmesh.frontend.errors import ApiError, ContextExceeded, InvalidRequest, Overloaded

USAGE = Usage(prompt=50, cached=16, stored=32, output=9, reasoning=3)
ANSWER: list[AnswerEvent] = [
    ThinkingDelta("hm"),
    ThinkingDelta("m"),
    TextDelta("I look"),
    ToolCallStart("c1", "read"),
    ToolCallDelta('{"path":'),
    ToolCallDelta('"a"}'),
    ToolCallEnd(),
    TextDelta("done"),
    ToolCallStart("c2", "list"),
    ToolCallEnd(),
]
SURFACES: list[Api] = [Chat(), Completions(), Messages(), Responses()]


def body(surface: Api, **fields: Any) -> bytes:
    prompts: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "Hi"}]},
        "completions": {"prompt": "Hi"},
        "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
        "responses": {"input": "Hi"},
    }
    return json.dumps({"model": "m", **prompts[surface.name], **fields}).encode()


def stream(renderer: Renderer, answer: list[AnswerEvent], ending: Ending) -> list[Any]:
    """What a client gets, event by event."""
    frames = renderer.begin() + renderer.started(USAGE)
    frames += b"".join(renderer.events(0, [event], []) for event in answer)
    frames += renderer.end(0, ending) + renderer.done(AnswerSummary(USAGE))
    return events(frames)


def events(frames: bytes) -> list[Any]:
    data = [line[6:] for line in frames.decode().splitlines() if line.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


def whole(surface: Api, answer: list[AnswerEvent], ending: Ending) -> Any:
    renderer = surface.parse(body(surface), {}).renderer
    renderer.events(0, answer, [])
    renderer.end(0, ending)
    return json.loads(renderer.whole(AnswerSummary(USAGE)))


def test_chat_streams_every_kind_of_content_in_order() -> None:
    surface = Chat()
    sent = body(surface, stream=True, stream_options={"include_usage": True})
    chunks = stream(surface.parse(sent, {}).renderer, ANSWER, Ending("stop"))
    assert chunks.pop() == "[DONE]"
    assert chunks.pop()["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert chunks.pop()["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hmm"
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert [call["index"] for call in calls] == [0, 0, 0, 1]
    assert calls[0]["id"] == "c1"
    assert "".join(call["function"]["arguments"] for call in calls[:3]) == '{"path":"a"}'
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_chat_answers_whole() -> None:
    answer = whole(Chat(), ANSWER, Ending("stop"))
    message = answer["choices"][0]["message"]
    assert message["content"] == "I lookdone"
    assert message["reasoning_content"] == "hmm"
    assert [call["id"] for call in message["tool_calls"]] == ["c1", "c2"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_messages_stream_is_a_sequence_of_closed_blocks() -> None:
    surface = Messages()
    sent = stream(surface.parse(body(surface, stream=True), {}).renderer, ANSWER, Ending("stop"))
    assert [sent[0]["type"], sent[-2]["type"], sent[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    usage = sent[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == 34
    assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
    assert usage["cache_read_input_tokens"] == 16
    assert sent[-2]["delta"]["stop_reason"] == "tool_use"
    assert sent[-2]["usage"]["output_tokens"] == 9
    check_blocks(sent[1:-2])
    kinds = [e["content_block"]["type"] for e in sent if e["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "text", "tool_use"]
    parts = [e["delta"].get("partial_json", "") for e in sent if e["type"] == "content_block_delta"]
    assert "".join(parts) == '{"path":"a"}'


def check_blocks(sent: list[Any]) -> None:
    """Each block starts, gets deltas and stops before the next one; indices count up."""
    current = -1
    is_open = False
    for event in sent:
        if event["type"] == "content_block_start":
            assert not is_open
            current, is_open = current + 1, True
        assert is_open
        assert event["index"] == current
        is_open = event["type"] != "content_block_stop"
    assert not is_open


def test_messages_without_any_token_still_start() -> None:
    surface = Messages()
    renderer = surface.parse(body(surface, stream=True), {}).renderer
    sent = events(
        renderer.begin() + renderer.end(0, Ending("stop")) + renderer.done(AnswerSummary(USAGE))
    )
    assert [event["type"] for event in sent] == ["message_start", "message_delta", "message_stop"]
    assert sent[1]["delta"]["stop_reason"] == "end_turn"


def test_messages_name_the_stop_sequence() -> None:
    answer = whole(Messages(), [TextDelta("x")], Ending("stop", "END"))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert whole(Messages(), [TextDelta("x")], Ending("length"))["stop_reason"] == "max_tokens"


def test_messages_give_tool_input_as_an_object() -> None:
    blocks = whole(Messages(), ANSWER, Ending("stop"))["content"]
    assert [block["type"] for block in blocks] == [
        "thinking",
        "text",
        "tool_use",
        "text",
        "tool_use",
    ]
    assert blocks[2]["input"] == {"path": "a"}
    assert blocks[4]["input"] == {}
    assert blocks[0]["signature"]


def test_responses_stream_numbers_and_closes_every_item() -> None:
    surface = Responses()
    sent = stream(surface.parse(body(surface, stream=True), {}).renderer, ANSWER, Ending("stop"))
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert [sent[0]["type"], sent[1]["type"]] == ["response.created", "response.in_progress"]
    final = sent[-1]
    assert final["type"] == "response.completed"
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert final["response"]["output"] == done
    assert [item["type"] for item in done] == [
        "reasoning",
        "message",
        "function_call",
        "message",
        "function_call",
    ]
    added = [event["item"]["id"] for event in sent if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]
    assert final["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 16
    assert final["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_responses_say_why_they_are_incomplete() -> None:
    answer = whole(Responses(), [TextDelta("x")], Ending("length"))
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"


def test_a_custom_tool_s_call_is_free_text() -> None:
    surface = Responses()
    call: list[AnswerEvent] = [
        ToolCallStart("c1", "apply_patch", custom=True),
        ToolCallDelta("*** Begin"),
        ToolCallEnd(),
    ]
    sent = stream(surface.parse(body(surface, stream=True), {}).renderer, call, Ending("stop"))
    kinds = [event["type"] for event in sent]
    assert "response.custom_tool_call_input.delta" in kinds
    item = sent[-1]["response"]["output"][0]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin")


def test_a_call_into_a_namespace_names_it() -> None:
    call: list[AnswerEvent] = [ToolCallStart("c1", "read", namespace="fs"), ToolCallEnd()]
    item = whole(Responses(), call, Ending("stop"))["output"][0]
    assert (item["name"], item["namespace"]) == ("read", "fs")


@pytest.mark.parametrize("surface", SURFACES, ids=lambda s: s.name)
def test_an_error_in_a_stream_has_the_api_s_shape(surface: Api) -> None:
    renderer = surface.parse(body(surface, stream=True), {}).renderer
    renderer.begin()
    sent = events(renderer.failed(Overloaded("full")))
    text = json.dumps(sent[0])
    assert "full" in text
    if surface.name == "responses":
        assert sent[0]["type"] == "response.failed"
        assert sent[0]["response"]["error"]["code"] == "server_is_overloaded"
    elif surface.name == "messages":
        assert sent[0]["type"] == "error"
        assert sent[0]["error"]["type"] == "overloaded_error"
    else:
        assert sent[-1] == "[DONE]"


def test_the_context_error_is_what_each_client_understands() -> None:
    long, both = ContextExceeded(900, None, 500), ContextExceeded(400, 200, 500)
    for surface in (Chat(), Completions(), Responses()):
        status, text = surface.error(long)
        assert status == 400
        assert json.loads(text)["error"]["code"] == "context_length_exceeded"
    assert b"prompt is too long: 900 tokens > 500 maximum" in Messages().error(long)[1]
    expected = b"input length and `max_tokens` exceed context limit: 400 + 200 > 500"
    assert expected in Messages().error(both)[1]
    assert Messages().error(Overloaded("x"))[0] == 529
    assert Chat().error(Overloaded("x"))[0] == 429


def test_messages_read_every_block() -> None:
    sent = {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be."}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "read", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "tool_reference", "tool_name": "grep"}],
                    },
                    {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
                    {"type": "something_new", "data": 1},
                ],
            },
            {"role": "system", "content": "Also."},
        ],
        "tools": [
            {"name": "read", "input_schema": {"type": "object"}},
            {"name": "grep", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "unknown": {"x": 1},
    }
    request = Messages().parse(json.dumps(sent).encode(), {}).request
    roles = [message.role for message in request.messages]
    assert roles == ["system", "user", "assistant", "user", "system"]
    assert request.messages[2].blocks[0] == Thinking("hm", "s")
    call = request.messages[2].blocks[1]
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"a": 1}
    result, image = request.messages[3].blocks
    assert isinstance(result, ToolResult)
    assert result.references == ["grep"]
    assert image == Image("http://x/y.png")
    assert [(tool.name, tool.deferred) for tool in request.tools] == [
        ("read", False),
        ("grep", True),
    ]


def test_responses_read_what_codex_sends() -> None:
    sent = {
        "model": "m",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "B"}],
            },
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": seal("hm")},
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "namespace": "n",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "***"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
            {"type": "web_search_call", "id": "w"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "x"}},
            {"type": "web_search"},
            {"type": "tool_search"},
        ],
        "client_metadata": {"b": 1, "a": 2},
        "prompt_cache_key": "s1",
        "store": False,
    }
    request = Responses().parse(json.dumps(sent).encode(), {}).request
    roles = [message.role for message in request.messages]
    expected = ["system", "user", "assistant", "assistant", "tool", "assistant", "tool"]
    assert roles == expected
    assert request.messages[2].blocks == [Thinking("hm")]
    assert [(t.name, t.namespace, t.custom) for t in request.tools] == [
        ("f", None, False),
        ("g", "n", False),
        ("patch", None, True),
    ]
    assert request.hints.session == "s1"


@pytest.mark.parametrize("surface", [Chat(), Responses()])
def test_a_custom_tool_s_grammar_may_be_a_regular_expression(surface: Api) -> None:
    for syntax, regex in (("lark", False), ("regex", True)):
        grammar = {"syntax": syntax, "definition": "[0-9]+"}
        custom = {"name": "date", "format": {"type": "grammar", "grammar": grammar}}
        flat = {"type": "custom", "name": "date", "format": {"type": "grammar", **grammar}}
        tool = flat if isinstance(surface, Responses) else {"type": "custom", "custom": custom}
        (made,) = surface.parse(body(surface, tools=[tool]), {}).request.tools
        assert (made.grammar, made.regex) == ("[0-9]+", regex)


def test_a_named_tool_choice_is_kept() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = {"type": "function", "function": {"name": "f"}}
    request = Chat().parse(body(Chat(), tools=tools, tool_choice=choice), {}).request
    assert (request.tool_choice.mode, request.tool_choice.name) == ("named", "f")


def test_sealed_thinking_opens_again_and_nothing_else_does() -> None:
    assert open_sealed(seal("thought " * 100)) == "thought " * 100
    for other in (None, "", "gAAAA", "kvm1:", "kvm1:%%%", "kvm1:AAAA"):
        assert open_sealed(other) == ""


WRONG = [
    {"model": 3},
    {"stream": "yes"},
    {"temperature": "hot"},
    {"top_p": 7},
    {"nvext": {"agent_hints": {"latency_sensitivity": 3}}},
    {"nvext": {"token_data": [-1]}},
    {"nvext": []},
]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda s: s.name)
@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_a_wrong_field_is_named(surface: Api, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        surface.parse(body(surface, **fields), {})
    assert error.value.param is not None
    assert error.value.param.split(".")[0].split("[")[0] == next(iter(fields))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "name", "input", "function", "schema", "tools"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        *("messages", "input", "prompt", "tools", "tool_choice", "response_format", "text"),
        *("system", "stop", "nvext", "thinking", "logit_bias", "n", "reasoning", "store"),
    ]
)
PARSERS = [*SURFACES, CountTokens(), InputTokens(), Tokenize()]


@given(st.sampled_from(PARSERS), st.dictionaries(FIELDS, JSON_VALUES, max_size=4))
def test_any_json_is_taken_or_refused_cleanly(parser: Any, fields: dict[str, Any]) -> None:
    sent = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", **fields}
    fault: ApiError | None = None
    try:
        parser.parse(json.dumps(sent).encode(), {})
    except ApiError as error:
        fault = error
    assert fault is None or parser.error(fault)[0] == 400


@given(st.sampled_from(PARSERS), st.binary(max_size=60))
def test_any_bytes_are_refused_cleanly(parser: Any, sent: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parser.parse(sent, {})
