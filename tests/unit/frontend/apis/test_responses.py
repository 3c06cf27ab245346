"""The Responses API: body to request, answer to frames, turns to store."""

import json
from typing import Any

import pytest
from support.stamp import STAMP
from unit.frontend.apis.answers import ANSWER, USAGE, body, stream, whole

from kvmesh.frontend.apis.base import Ending
from kvmesh.frontend.apis.content.compaction import HEAD, without_compacted
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.sealed_reasoning import open_sealed, seal
from kvmesh.frontend.conversation import (
    AnswerEvent,
    Compact,
    ConversationSummary,
    TextDelta,
    Thinking,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kvmesh.frontend.errors import InvalidRequest

Json = dict[str, Any]


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


def test_compaction_is_asked_for_by_a_threshold_or_an_item() -> None:
    def asked(*items: Json, **fields: Any) -> Compact | None:
        sent = {"model": "m", "input": [{"role": "user", "content": "Hi"}, *items], **fields}
        edits = Responses().parse(json.dumps(sent).encode(), {}, STAMP).request.context_edits
        return None if edits is None else edits.compact

    managed: Json = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
    assert asked() is None
    assert asked(**managed) == Compact(1000)
    assert asked(context_management=[{"type": "compaction"}]) == Compact()
    assert asked(context_management=[{"type": "other"}]) is None
    trigger = {"type": "compaction_trigger"}
    assert asked(trigger) == Compact(pauses=True, always=True)
    refused: list[tuple[list[Json], Json, str]] = [
        ([trigger, {"role": "user", "content": "x"}], {}, "input[1]"),
        ([trigger], {"background": True}, "input[1]"),
        ([], {**managed, "background": True}, "context_management"),
    ]
    for items, fields, param in refused:
        with pytest.raises(InvalidRequest) as raised:
            asked(*items, **fields)
        assert raised.value.param == param


def test_a_summary_stands_for_all_before_it_and_brings_its_system_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base: list[Json] = [{"role": "developer", "content": "Base"}, {"role": "user", "content": "a"}]
    sent = {"model": "m", "instructions": "I", "input": base, "stream": True}
    call = Responses().parse(json.dumps(sent).encode(), {}, STAMP)
    assert call.compacted is not None
    begin, compacted = call.renderer.begin, call.compacted

    def begun(so_far: object = None) -> bytes:
        head = begin()
        compacted(ConversationSummary("sum", origin=7), USAGE, False)
        return head

    monkeypatch.setattr(call.renderer, "begin", begun)
    found = stream(call.renderer, [TextDelta("On.")], Ending("stop"))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    output = found[-1]["response"]["output"]
    done = [event for event in found if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == output
    assert [event["output_index"] for event in done] == [0, 1]
    assert [item["type"] for item in output] == ["compaction", "message"]
    following = {"role": "user", "content": "b"}
    whole_history = [*base, *output, following]
    for items in (whole_history, whole_history[2:]):
        again = json.dumps({**sent, "input": items}).encode()
        messages = Responses().parse(again, {}, STAMP).request.messages
        shown, summary = without_compacted(messages)
        assert summary is not None
        assert summary.origin == 7
        texts = [(m.role, "".join(getattr(b, "text", "?") for b in m.blocks)) for m in shown]
        assert texts == [
            ("system", "I"),
            ("system", "Base"),
            ("user", f"{HEAD}sum"),
            ("assistant", "On."),
            ("user", "b"),
        ]


@pytest.mark.parametrize("opaque", ["gAAAA", seal("hm"), seal('["sum", [], 4294967296]')])
def test_a_summary_that_this_server_has_not_written_is_listed_as_unread(opaque: str) -> None:
    items = [{"type": "compaction", "encrypted_content": opaque}, {"role": "user", "content": "b"}]
    sent = {"model": "m", "input": items}
    request = Responses().parse(json.dumps(sent).encode(), {}, STAMP).request
    assert request.ignored == ["input[0]"]
    assert [message.role for message in request.messages] == ["user"]
