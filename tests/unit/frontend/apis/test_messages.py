"""The Messages API: body to request, answer to frames."""

import json
from typing import Any

from support.stamp import STAMP
from unit.frontend.apis.answers import ANSWER, USAGE, body, events, stream, whole

from kvmesh.frontend.apis.base import AnswerSummary, Ending
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.conversation import (
    Image,
    TextDelta,
    Thinking,
    ToolCall,
    ToolResult,
)


def test_messages_stream_is_a_sequence_of_closed_blocks() -> None:
    api = Messages()
    sent = stream(api.parse(body(api, stream=True), {}, STAMP).renderer, ANSWER, Ending("stop"))
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
    api = Messages()
    renderer = api.parse(body(api, stream=True), {}, STAMP).renderer
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


def test_messages_parse_every_kind_of_block() -> None:
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
    request = Messages().parse(json.dumps(sent).encode(), {}, STAMP).request
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
