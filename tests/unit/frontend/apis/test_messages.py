"""The Messages API: body to request, answer to frames."""

import json
from typing import Any

import pytest
from support.stamp import STAMP
from unit.frontend.apis.answers import ANSWER, USAGE, body, events, stream, whole

from kvmesh.frontend.apis.base import AnswerSummary, Ending
from kvmesh.frontend.apis.content.compaction import HEAD, without_compacted
from kvmesh.frontend.apis.messages.api import SHAPE, CountTokens, Messages
from kvmesh.frontend.apis.sealed_reasoning import MAX_BYTES, seal
from kvmesh.frontend.conversation import (
    ClearThinking,
    ClearToolUses,
    Compact,
    ContextEdits,
    Image,
    TextDelta,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest


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
    assert request.messages[2].blocks[0] == Thinking("hm")
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


OMITTED = {"thinking": {"type": "adaptive", "display": "omitted"}}


def parsed(**fields: Any) -> Any:
    return Messages().parse(body(Messages(), **fields), {}, STAMP)


def returned(*blocks: dict[str, Any]) -> list[Any]:
    """The blocks of an assistant message that a client returns."""
    user = {"role": "user", "content": "Hi"}
    sent = [user, {"role": "assistant", "content": list(blocks)}, user]
    found: list[Any] = parsed(messages=sent).request.messages[1].blocks
    return found


def thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def test_omitted_thinking_returns_in_its_signature() -> None:
    sent = stream(parsed(stream=True, **OMITTED).renderer, ANSWER, Ending("stop"))
    check_blocks(sent[1:-2])
    (start, signed, stop) = [event for event in sent if event.get("index") == 0]
    assert start["content_block"] == thinking("", "")
    assert signed["delta"]["type"] == "signature_delta"
    assert stop["type"] == "content_block_stop"
    (block,) = returned(thinking("", signed["delta"]["signature"]))
    assert block.text == "hmm"
    call = parsed(**OMITTED)
    call.renderer.events(0, ANSWER, [])
    shown = json.loads(call.renderer.whole(AnswerSummary(USAGE)))
    assert shown["content"][0] == thinking("", signed["delta"]["signature"])
    assert shown["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


@pytest.mark.parametrize("display", [None, "summarized", "updates", "of the future"])
def test_other_displays_show_thinking_with_a_short_signature(display: str | None) -> None:
    call = parsed(
        thinking={"type": "enabled", "budget_tokens": 1024, "display": display}, nvext=IGNORED
    )
    call.renderer.events(0, ANSWER, [])
    block = json.loads(call.renderer.whole(AnswerSummary(USAGE)))["content"][0]
    assert (block["thinking"], len(block["signature"])) == ("hmm", 48)
    assert call.request.ignored == ([] if display is None else ["thinking.display"])
    assert [b.text for b in returned(block)] == ["hmm"]


@pytest.mark.parametrize(
    "signature", ["", "x", "EqQBCgIYAhIM1gbcDa9GJwZA2b3h", "kvm1:?", "kvm1:AAAA"]
)
def test_empty_thinking_with_another_signature_stays_empty(signature: str) -> None:
    assert [block.text for block in returned(thinking("", signature))] == [""]


def test_a_text_of_thinking_goes_before_its_signature() -> None:
    assert [block.text for block in returned(thinking("a", seal("b")))] == ["a"]


def test_sealed_thinking_is_bounded_for_a_whole_request() -> None:
    half = thinking("", seal("é" * (MAX_BYTES // 4 + 1)))
    assert len(half["signature"]) < 100_000
    assert len(returned(half)) == 1
    with pytest.raises(InvalidRequest) as error:
        returned(half, half)
    assert error.value.param == "messages.1.content.1.signature"


def test_opened_thinking_counts_as_a_part_of_the_body() -> None:
    user = {"role": "user", "content": "Hi"}
    block = {"role": "assistant", "content": [thinking("", seal("x" * 5000))]}
    assert parsed(messages=[user, block, user]).request.body_bytes == 5000


IGNORED = {"extra_fields": ["ignored"]}
TRIGGER = {"type": "input_tokens", "value": 50}


def edits(*given: Any) -> dict[str, Any]:
    return {"context_management": {"edits": list(given)}, "nvext": IGNORED}


def test_context_edits_have_the_published_defaults() -> None:
    tools = {"type": "clear_tool_uses_20250919"}
    call = parsed(**edits({"type": "clear_thinking_20251015"}, tools))
    assert call.request.context_edits == ContextEdits(
        ClearThinking(1), ClearToolUses(tokens=100_000, uses=None, keep=3)
    )
    assert call.request.ignored == []


def test_context_edits_are_read_with_all_their_fields() -> None:
    tools = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 5},
        "keep": {"type": "tool_uses", "value": 0},
        "clear_at_least": {"type": "input_tokens", "value": 7},
        "exclude_tools": ["a"],
        "clear_tool_inputs": ["b"],
    }
    thoughts = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}
    found = parsed(**edits(tools, thoughts)).request.context_edits
    given = ClearToolUses(None, 5, 0, 7, frozenset("a"), frozenset("b"))
    assert found == ContextEdits(ClearThinking(2), given)
    every = parsed(**edits({**tools, "clear_tool_inputs": True})).request.context_edits
    assert every.tool_uses.inputs is None


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
def test_thinking_may_be_kept(keep: Any) -> None:
    edit = {"type": "clear_thinking_20251015", "keep": keep}
    assert parsed(**edits(edit)).request.context_edits == ContextEdits()


def test_compaction_is_an_edit() -> None:
    plain = {"type": "compact_20260112"}
    assert parsed(**edits(plain)).request.context_edits == ContextEdits(compact=Compact())
    trigger = {"type": "input_tokens", "value": 5}
    more = {"pause_after_compaction": True, "instructions": "Briefly.", "trigger": trigger}
    found = parsed(**edits({**plain, **more})).request.context_edits
    assert found == ContextEdits(compact=Compact(5, True, "Briefly."))


def test_a_summary_stands_for_what_is_before_it() -> None:
    def summary(text: str | None) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "compaction", "content": text}]}

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def shown(*messages: dict[str, Any]) -> list[tuple[str, str]]:
        made, _ = without_compacted(parsed(system="S", messages=[*messages]).request.messages)
        texts = ["".join(getattr(b, "text", "?") for b in message.blocks) for message in made]
        return [(message.role, text) for message, text in zip(made, texts, strict=True)]

    head = ("system", "S")
    assert shown(user("a"), summary("first"), user("b"), summary("then"), user("c")) == [
        head,
        ("user", f"{HEAD}then\n\nc"),
    ]
    answer = {
        "role": "assistant",
        "content": [{"type": "compaction", "content": "sum"}, {"type": "text", "text": "On."}],
    }
    assert shown(user("a"), answer, user("b")) == [
        head,
        ("user", f"{HEAD}sum"),
        ("assistant", "On."),
        ("user", "b"),
    ]
    assert shown(user("a"), summary(None), user("b")) == [head, ("user", "a"), ("user", "b")]


def test_unknown_edits_are_listed_and_have_no_effect() -> None:
    call = parsed(**edits({"type": "compact", "trigger": TRIGGER}, {"type": "x", "keep": 5}))
    names = [f"context_management.edits[{index}]" for index in (0, 1)]
    assert (call.request.context_edits, call.request.ignored) == (ContextEdits(), names)
    call.renderer.events(0, ANSWER, [])
    whole_message = json.loads(call.renderer.whole(AnswerSummary(USAGE)))
    assert whole_message["context_management"] == {"applied_edits": []}


@pytest.mark.parametrize(
    ("edit", "param"),
    [
        ({}, "0.type"),
        (
            {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}},
            "0.keep.value",
        ),
        ({"type": "clear_tool_uses_20250919", "keep": "all"}, "0.keep"),
        (
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "x", "value": 1}},
            "0.trigger.type",
        ),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses"}}, "0.trigger.value"),
        ({"type": "clear_tool_uses_20250919", "exclude_tools": "a"}, "0.exclude_tools"),
        ({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}, "0.keep.value"),
        (
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}},
            "0.keep.value",
        ),
        ({"type": "clear_thinking_20251015", "keep": "none"}, "0.keep"),
    ],
)
def test_a_malformed_edit_is_refused_with_its_field(edit: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parsed(**edits(edit))
    assert error.value.param == f"context_management.edits.{param}"
    status, sent = SHAPE.error(error.value, "req_1")
    assert status == 400
    assert json.loads(sent)["error"]["type"] == "invalid_request_error"
    assert f"context_management.edits.{param[0]}" in json.loads(sent)["error"]["message"]


def test_an_edit_may_not_be_given_twice() -> None:
    with pytest.raises(InvalidRequest) as error:
        parsed(**edits(*[{"type": "clear_tool_uses_20250919"}] * 2))
    assert error.value.param == "context_management.edits.1.type"


def test_answers_report_the_edits_applied_only_if_the_request_has_some() -> None:
    call = parsed(stream=True, **edits())
    done = [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 1, "cleared_input_tokens": 2}]
    call.request.context_edits.applied = done
    last = stream(call.renderer, ANSWER, Ending("stop"))[-2]
    assert (last["type"], last["context_management"]) == ("message_delta", {"applied_edits": done})
    for fields in ({}, {"context_management": None}):
        last = stream(parsed(stream=True, **fields).renderer, ANSWER, Ending("stop"))[-2]
        assert "context_management" not in last


def test_token_counts_have_the_original_count_beside_the_edited_one() -> None:
    prompts = [bytes(4 * 10)]
    counted = CountTokens().parse(body(Messages(), **edits()), {}, STAMP).request
    answer = json.loads(CountTokens().answer(counted, prompts, 100))
    assert answer == {"input_tokens": 10, "context_management": {"original_input_tokens": 10}}
    counted.context_edits.original_tokens = 25  # type: ignore[union-attr]
    answer = json.loads(CountTokens().answer(counted, prompts, 100))
    assert answer["context_management"] == {"original_input_tokens": 25}
    plain = CountTokens().parse(body(Messages()), {}, STAMP).request
    assert json.loads(CountTokens().answer(plain, prompts, 100)) == {"input_tokens": 10}


@pytest.mark.parametrize("parser", [Messages(), CountTokens()])
def test_a_conversation_that_the_server_is_to_hold_is_refused_as_the_sdks_know_it(
    parser: Any,
) -> None:
    sent = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(InvalidRequest) as error:
        parser.parse(body(Messages(), thread=sent), {}, STAMP)
    status, text = SHAPE.error(error.value, "req_1")
    assert (status, error.value.param) == (400, "thread")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert json.loads(text)["error"]["details"] == details
