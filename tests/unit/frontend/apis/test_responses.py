"""The Responses API: body to request, answer to frames, turns to store."""

import json

from support.stamp import STAMP
from unit.frontend.apis.answers import ANSWER, body, stream, whole

from kvmesh.frontend.apis.base import Ending
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.sealed_reasoning import open_sealed, seal
from kvmesh.frontend.conversation import (
    AnswerEvent,
    TextDelta,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


def test_responses_stream_numbers_and_closes_every_item() -> None:
    api = Responses()
    sent = stream(api.parse(body(api, stream=True), {}, STAMP).renderer, ANSWER, Ending("stop"))
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


def test_responses_state_the_reason_for_being_incomplete() -> None:
    answer = whole(Responses(), [TextDelta("x")], Ending("length"))
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"


def test_a_custom_tool_s_call_is_free_text() -> None:
    api = Responses()
    call: list[AnswerEvent] = [
        ToolCallStart("c1", "apply_patch", custom=True),
        ToolCallDelta("*** Begin"),
        ToolCallEnd(),
    ]
    sent = stream(api.parse(body(api, stream=True), {}, STAMP).renderer, call, Ending("stop"))
    kinds = [event["type"] for event in sent]
    assert "response.custom_tool_call_input.delta" in kinds
    item = sent[-1]["response"]["output"][0]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin")


def test_a_call_into_a_namespace_names_it() -> None:
    call: list[AnswerEvent] = [ToolCallStart("c1", "read", namespace="fs"), ToolCallEnd()]
    item = whole(Responses(), call, Ending("stop"))["output"][0]
    assert (item["name"], item["namespace"]) == ("read", "fs")


def test_responses_parse_a_request_of_codex() -> None:
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
    request = Responses().parse(json.dumps(sent).encode(), {}, STAMP).request
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


def test_sealed_thinking_opens_again_and_nothing_else_does() -> None:
    assert open_sealed(seal("thought " * 100)) == "thought " * 100
    for other in (None, "", "gAAAA", "kvm1:", "kvm1:%%%", "kvm1:AAAA"):
        assert open_sealed(other) == ""
