"""Edits of a growing conversation: what is cleared, and that it stays cleared."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stamp import STAMP
from unit.frontend.preprocess.test_preprocessor import make_preprocessor, served

from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.conversation import (
    ClearThinking,
    ClearToolUses,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.preprocess.context_edits import (
    PLACEHOLDER,
    TokenWeights,
    clear_tool_uses,
    drop_thinking,
)
from kvmesh.frontend.tokenizer.text_slices import MAX_RUN

USER = Message("user", [Text("Look")])


def use(number: int, tool: str = "read", calls: int = 1) -> list[Message]:
    """One step of a tool loop, with parallel `calls`."""
    ids = [f"c{number}.{call}" for call in range(calls)]
    made = [ToolCall(name, tool, '{"path": "a"}') for name in ids]
    results = [ToolResult(name, [Text(f"{name}: all of the file")]) for name in ids]
    return [Message("assistant", [Thinking(f"t{number}"), *made]), Message("user", [*results])]


def loop(steps: int) -> list[Message]:
    return [USER, *(message for number in range(steps) for message in use(number))]


def cleared_ids(messages: list[Message]) -> list[str]:
    blocks = [block for message in messages for block in message.blocks]
    results = [block for block in blocks if isinstance(block, ToolResult)]
    return [block.call_id for block in results if block.content == [Text(PLACEHOLDER)]]


def edited(messages: list[Message], edit: ClearToolUses, each: int = 0) -> list[Message]:
    """The messages after the edit, where each tool result and nothing else has `each` tokens."""
    places = [
        (i, j)
        for i, message in enumerate(messages)
        for j, block in enumerate(message.blocks)
        if isinstance(block, ToolResult)
    ]
    return clear_tool_uses(messages, edit, TokenWeights(0, dict.fromkeys(places, each), 0))[0]


def test_the_oldest_results_are_cleared_and_the_newest_kept() -> None:
    after = edited(loop(5), ClearToolUses(None, 4, keep=2))
    assert cleared_ids(after) == ["c0.0", "c1.0", "c2.0"]
    assert after[1] == loop(5)[1], "the call stays"
    assert loop(5)[2].blocks[0].content != after[2].blocks[0].content  # type: ignore[union-attr]


@pytest.mark.parametrize(("steps", "count"), [(3, 0), (4, 3), (5, 3), (6, 3), (7, 6)])
def test_more_is_cleared_only_where_the_trigger_is_exceeded_again(steps: int, count: int) -> None:
    assert len(cleared_ids(edited(loop(steps), ClearToolUses(None, 3, keep=1)))) == count
    assert len(cleared_ids(edited(loop(steps), ClearToolUses(30, None, keep=1), each=10))) == count


def test_nothing_is_cleared_for_less_than_the_least() -> None:
    edit = ClearToolUses(20, None, keep=1, at_least=40)
    assert cleared_ids(edited(loop(4), edit, each=10)) == []
    assert len(cleared_ids(edited(loop(5), edit, each=10))) == 4
    assert len(cleared_ids(edited(loop(6), edit, each=10))) == 4


def test_results_that_the_model_has_not_read_stay() -> None:
    parallel = [USER, *use(0), *use(1, calls=3)]
    assert cleared_ids(edited(parallel, ClearToolUses(None, 1, keep=0))) == ["c0.0"]
    answered = [*parallel, Message("assistant", [Text("So")]), USER]
    assert len(cleared_ids(edited(answered, ClearToolUses(None, 1, keep=0)))) == 4


def test_excluded_tools_stay() -> None:
    messages = [USER, *use(0, "search"), *use(1), *use(2), *use(3)]
    edit = ClearToolUses(None, 3, keep=1, exclude=frozenset({"search"}))
    assert cleared_ids(edited(messages, edit)) == ["c1.0", "c2.0"]


@pytest.mark.parametrize(
    ("inputs", "wiped"), [(None, 2), (frozenset({"read"}), 1), (frozenset(), 0)]
)
def test_inputs_are_cleared_on_request(inputs: frozenset[str] | None, wiped: int) -> None:
    messages = [USER, *use(0, "search"), *use(1), *use(2)]
    after = edited(messages, ClearToolUses(None, 2, keep=1, inputs=inputs))
    calls = [b for m in after for b in m.blocks if isinstance(b, ToolCall)]
    assert sum(call.arguments == "{}" for call in calls) == wiped


def test_results_that_make_tools_available_stay() -> None:
    found = ToolResult("c0.0", [], references=["deferred"])
    messages = [USER, use(0)[0], Message("user", [found]), *use(1), *use(2)]
    assert cleared_ids(edited(messages, ClearToolUses(None, 1, keep=1))) == ["c1.0"]


def test_calls_without_results_and_results_without_calls_are_left_alone() -> None:
    lost = Message("user", [ToolResult("unknown", [Text("x")])])
    messages = [USER, use(0)[0], USER, lost, *use(1), *use(2), *use(3)]
    assert cleared_ids(edited(messages, ClearToolUses(None, 1, keep=1))) == ["c1.0", "c2.0"]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(0, 4),
    st.integers(1, 60),
    st.integers(0, 60),
)
def test_a_later_request_clears_what_earlier_ones_cleared(
    steps: list[tuple[int, int]], keep: int, trigger: int, least: int
) -> None:
    edit = ClearToolUses(trigger, None, keep, least)
    messages, weights = [USER], TokenWeights()
    before: list[str] = []
    for number, (calls, tokens) in enumerate(steps):
        messages += use(number, calls=calls)
        for position in range(calls):
            weights.blocks[len(messages) - 1, position] = tokens
        after, uses = clear_tool_uses(messages, edit, weights)
        now = cleared_ids(after)
        assert len(uses) == len(now)
        assert now[: len(before)] == before
        before = now


def test_thinking_of_old_turns_is_dropped() -> None:
    answer = Message("assistant", [Thinking("a"), Text("So")])
    messages = [*loop(2), answer, USER, answer, USER, *use(9)]
    for keep, turns in ((1, 2), (2, 1), (3, 0)):
        after, count = drop_thinking(messages, ClearThinking(keep))
        assert count == turns
        kept = [b.text for m in after for b in m.blocks if isinstance(b, Thinking)]
        assert kept == ["t0", "t1", "a", "a", "t9"][{1: 4, 2: 3, 3: 0}[keep] :]
    assert len(drop_thinking(messages, ClearThinking(1))[0]) == len(messages)


# --- with a model's template and tokenizer ---

TOOL = {"name": "read", "description": "Read a file", "input_schema": {"type": "object"}}
WORDS = "the quick brown fox jumps over the lazy dog and reads one more file "


def request(steps: int, *edits: dict[str, Any], padding: int = 0) -> Any:
    """A tool loop with results of about 65 tokens, as a client sends it."""
    messages: list[Any] = [{"role": "user", "content": "Look at the files"}]
    for number in range(steps):
        call = {"type": "tool_use", "id": f"c{number}", "name": "read", "input": {"path": "a"}}
        thought = {"type": "thinking", "thinking": f"File {number} is next.", "signature": ""}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": WORDS * 5}
        messages += [
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result]},
        ]
    sent = {"model": "m", "max_tokens": 9, "tools": [TOOL], "messages": messages}
    sent |= {"context_management": {"edits": list(edits)}} if edits else {}
    body = json.dumps(sent).encode()
    made = Messages().parse(body, {}, STAMP).request
    made.body_bytes = len(body) + padding
    return made


def clear(trigger: int, keep: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": trigger},
        "keep": {"type": "tool_uses", "value": keep},
        **fields,
    }


async def count(made: Any, context: int = 4096) -> int:
    prompts = await make_preprocessor().count(made, served(context))
    return sum(map(len, prompts)) // 4


async def test_the_prompt_is_edited_and_the_savings_are_counted() -> None:
    plain, made = await count(request(12)), request(12, clear(500, keep=2))
    made.body_bytes = 1 << 20
    tokens = await count(made)
    edits = made.context_edits
    (applied,) = edits.applied
    assert edits.original_tokens == plain
    assert applied["cleared_input_tokens"] == plain - tokens > 300
    assert applied["cleared_tool_uses"] == len(cleared_ids(made.messages))
    assert tokens < plain


async def test_below_the_trigger_nothing_is_edited() -> None:
    made = request(12, clear(5000))
    before = list(made.messages)
    tokens = await count(made)
    assert tokens == await count(request(12))
    assert made.messages == before
    assert (made.context_edits.applied, made.context_edits.original_tokens) == ([], None)


async def test_a_body_too_small_for_the_trigger_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preprocessor = make_preprocessor()
    monkeypatch.setattr(preprocessor, "_count_messages", None)
    await preprocessor.count(request(3, clear(100_000)), served(4096))
    keep = {"type": "clear_thinking_20251015", "keep": "all"}
    await preprocessor.count(request(3, keep), served(4096))


async def test_clears_are_stable_from_turn_to_turn() -> None:
    preprocessor, before = make_preprocessor(), b""
    extended = 0
    for steps in range(1, 40):
        made = request(steps, clear(2500))
        made.body_bytes = 1 << 20
        (tokens,) = await preprocessor.count(made, served(8192))
        assert len(tokens) // 4 < 2500 + 100
        # the end of a prompt asks for an answer
        extended += tokens.startswith(before[: len(before) - 4 * 8])
        before = tokens
    assert extended >= 30


async def test_a_prompt_beyond_the_context_fits_once_it_is_edited() -> None:
    made = request(20, clear(800))
    made.body_bytes = 1 << 20
    assert await count(made, 1400) < 1400
    (applied,) = made.context_edits.applied
    exact = await count(request(20))
    assert abs(made.context_edits.original_tokens - exact) < 0.2 * exact
    assert applied["cleared_input_tokens"] > 400
    kept = request(20, clear(800, exclude_tools=["read"]), padding=1 << 20)
    assert await count(kept, 1400) > 1400


async def test_both_edits_are_reported_apart() -> None:
    plain = request(12)
    plain.messages = [*plain.messages, *plain.messages]
    whole = await count(plain)
    thinking = {"type": "clear_thinking_20251015"}
    made = request(12, thinking, clear(500), padding=1 << 20)
    made.messages = [*made.messages, *made.messages]
    left = await count(made)
    first, second = made.context_edits.applied
    assert (first["type"], first["cleared_thinking_turns"]) == ("clear_thinking_20251015", 1)
    assert second["type"] == "clear_tool_uses_20250919"
    saved = first["cleared_input_tokens"] + second["cleared_input_tokens"]
    assert (made.context_edits.original_tokens, saved) == (whole, whole - left)


async def test_a_text_that_cannot_be_tokenized_may_be_cleared() -> None:
    made = request(12, clear(500), padding=1 << 20)
    (result,) = made.messages[2].blocks
    long = Text("x" * (2 * MAX_RUN + 1))
    made.messages[2] = Message("user", [ToolResult(result.call_id, [long])])
    assert await count(made) < 2000
    assert made.context_edits.applied


async def test_generation_gets_the_edited_prompt() -> None:
    made = request(12, clear(500), padding=1 << 20)
    prepared = await make_preprocessor().prepare(made, served(4096), None)
    again = request(12, clear(500), padding=1 << 20)
    assert prepared.prompt_tokens == await count(again)
    assert made.context_edits.applied == again.context_edits.applied
