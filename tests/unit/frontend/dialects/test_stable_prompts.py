"""The prompt of each turn is a prefix of the next turn's prompt."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.frontend.dialects.recorded import TODAY, call, request, result, template, tool

from kvmesh.frontend.conversation import (
    Block,
    CacheControl,
    Message,
    Text,
    Thinking,
    Tool,
    ToolResult,
)

NAMES = ["demo", "chatml", "llama3", "mistral", "gemma", "deepseek"]
RENDERERS = {name: template(name) for name in NAMES}
TOOLS = [tool("read", path={"type": "string"}), tool("search", query={"type": "string"})]
LATER = tool("grep", deferred=True)
WORDS = st.sampled_from(["look", "fix the test", "é\n  {{ x }}", "<b> & 'c'", "done.", "42"])
TEXT = st.builds(Text, WORDS)


@st.composite
def answers(draw: st.DrawFn, number: int) -> list[Message]:
    """An assistant's turn and the results of its calls, in the form of any API."""
    thinking: list[Block] = draw(st.lists(st.builds(Thinking, WORDS), max_size=1))
    text: list[Block] = list(draw(st.lists(TEXT, max_size=1)))
    names = draw(st.lists(st.sampled_from(["read", "search"]), max_size=2))
    ids = [f"call_{number}_{place}_{draw(st.integers(0, 9))}" for place in range(len(names))]
    calls: list[Block] = [call(n, i, path="a/b") for n, i in zip(names, ids, strict=True)]
    answer_blocks = thinking + text + calls or [Text("ok")]
    results: list[Block] = [ToolResult(i, list(draw(st.lists(TEXT, max_size=2)))) for i in ids]
    if draw(st.booleans()):
        spoken = [Message(role="assistant", blocks=[block]) for block in answer_blocks]
    else:
        spoken = [Message(role="assistant", blocks=answer_blocks)]
    return spoken + draw(_back(results))


@st.composite
def _back(draw: st.DrawFn, results: list[Block]) -> list[Message]:
    """Results and perhaps a user text, in one message (Anthropic) or several (OpenAI)."""
    remark: list[Block] = list(draw(st.lists(TEXT, min_size=0 if results else 1, max_size=2)))
    if draw(st.booleans()):
        return [Message(role="user", blocks=results + remark)]
    back = [Message(role="tool", blocks=[r]) for r in results]
    if remark:
        back.append(Message(role=draw(st.sampled_from(["user", "system"])), blocks=remark))
    return back


@st.composite
def conversations(draw: st.DrawFn) -> list[list[Message]]:
    """The messages of each request of a session."""
    system = Message(role="system", blocks=[Text("Be brief."), Text("You are an agent.")])
    held = [*draw(st.sampled_from([[], [system]])), Message(role="user", blocks=[Text("hi")])]
    turns = [held]
    for number in range(draw(st.integers(1, 4))):
        held = held + draw(answers(number))
        turns.append(held)
    return turns


def breakpoint_at_end(messages: list[Message], turn: int) -> list[Message]:
    """The messages with the cache breakpoint that a harness sets in request `turn`."""
    billing = Text(f"x-anthropic-billing-header: cc_version=2; cch={turn};")
    *before, last = messages
    marked = [_marked(b) if b is last.blocks[-1] else b for b in last.blocks]
    first = [Message(role="system", blocks=[billing])]
    return first + before + [Message(role=last.role, blocks=marked)]


def _marked(block: Block) -> Block:
    return Text(block.text, CacheControl(300)) if isinstance(block, Text) else block


@pytest.mark.parametrize("name", NAMES)
@given(turns=conversations(), with_tools=st.booleans())
def test_a_turn_extends_the_one_before(
    name: str, turns: list[list[Message]], with_tools: bool
) -> None:
    prompts = []
    for number, messages in enumerate(turns):
        dressed = breakpoint_at_end(messages, number)
        tools = _tools(number) if with_tools else []
        prompts.append(RENDERERS[name].render(request(*dressed, tools=tools), TODAY))
    for before, after in pairwise(prompts):
        assert after.startswith(before)


def _tools(turn: int) -> list[Tool]:
    """The tools of request `turn`: from the second on, with a deferred tool in the middle."""
    return [TOOLS[0], LATER, TOOLS[1]] if turn else TOOLS


@pytest.mark.parametrize("name", NAMES)
def test_the_division_of_content_into_blocks_has_no_effect(name: str) -> None:
    def prompt(*blocks: Any) -> str:
        message = Message(role="user", blocks=list(blocks))
        return RENDERERS[name].render(request(message), TODAY)

    assert prompt(Text("hi")) == prompt(Text("hi", CacheControl(300)))


@pytest.mark.parametrize("name", NAMES)
def test_texts_around_a_call_stay_apart(name: str) -> None:
    asked = Message("user", [Text("Read it.")])
    answer = Message("assistant", [Text("First."), call("read"), Text("Second.")])
    shown = RENDERERS[name].render(request(asked, answer, result("x"), tools=[tool("read")]), TODAY)
    assert "First." in shown
    assert "Second." in shown
    assert "First.Second." not in shown
