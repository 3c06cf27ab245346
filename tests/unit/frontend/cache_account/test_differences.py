"""The part that differs from the earlier prompt is named exactly, whatever the prompts contain."""

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from unit.frontend.cache_account.edits import NAMES, compared, earlier, model, prepared, request

from kvmesh.bus.messages import PromptChange
from kvmesh.frontend.cache_account.prompt_parts import BUDGET, locate
from kvmesh.frontend.conversation import Block, Message, Text, Thinking, Tool, ToolCall, ToolResult
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt

WORDS = ["ok", "echo", "read", "write", "the file", '"read"', "tool", "X", "again again", "Done."]
TEMPLATES = st.sampled_from(NAMES)
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)


class Conversation(NamedTuple):
    tools: list[Tool]
    messages: list[Message]


@st.composite
def tools(draw: st.DrawFn) -> list[Tool]:
    """Tools of clients and of MCP servers, some custom, whose descriptions mention each other."""
    count = draw(st.sampled_from([1, 2, 9, 30, 80]))
    found = []
    for number in range(count):
        kind = draw(st.sampled_from(["plain", "namespaced", "custom"]))
        parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
        found.append(
            Tool(
                name=f"tool_{number:02}" if kind != "plain" else f"t{number}",
                description=f'{draw(TEXT)} Like "tool_{draw(st.integers(0, count))}".',
                parameters={} if kind == "custom" else parameters,
                namespace="mcp__big" if kind == "namespaced" else None,
                custom=kind == "custom",
            )
        )
    return found


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    given_tools = draw(tools())
    messages = [Message("system", [Text(draw(TEXT))]), Message("user", [Text(draw(TEXT))])]
    for number in range(draw(st.integers(0, 6))):
        text = draw(TEXT)
        if draw(st.booleans()):
            name = draw(st.sampled_from(given_tools))
            arguments = "echo" if name.custom else json.dumps({"path": f"echo {text}"})
            call = ToolCall(f"c{number}", name.name, arguments, name.namespace, name.custom)
            thinking = [Thinking(draw(TEXT))] if draw(st.booleans()) else []
            messages.append(Message("assistant", [*thinking, call]))
            messages.append(Message("tool", [ToolResult(f"c{number}", [Text(text)])]))
        else:
            messages.append(Message("assistant", [Text(text)]))
            messages.append(Message("user", [Text(draw(TEXT))]))
    return Conversation(given_tools, messages)


def named(change: PromptChange | None) -> tuple[str, int | None, str | None, str]:
    assert change is not None
    return change.part, change.index, change.name, change.way


def change_of(template: str, before: Conversation, after: Conversation) -> Any:
    served = model(template)
    try:
        old = earlier(prepared(request(before.messages, before.tools), served))
        return compared(prepared(request(after.messages, after.tools), served), old)
    except InvalidRequest:
        reject()  # its roles do not alternate, as this template demands


def name_of(tool: Tool) -> str:
    return f"{tool.namespace}__{tool.name}" if tool.namespace else tool.name


@given(TEMPLATES, conversations(), st.data())
def test_an_edited_tool_is_named(template: str, before: Conversation, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(before.tools) - 1))
    way = data.draw(st.sampled_from(["changed", "inserted", "removed"]))
    old = before.tools[index]
    edited = list(before.tools)
    if way == "changed":
        edited[index] = Tool("renamed", old.description, {}, old.namespace)
        name = name_of(edited[index])
    elif way == "inserted":
        edited.insert(index, Tool("added", "Adds.", {}, "mcp__new"))
        name = "mcp__new__added"
    else:
        del edited[index]
        name = name_of(old)
    found = change_of(template, before, Conversation(edited, before.messages))
    if found.change is None:
        return  # the template does not show it
    assert named(found.change) == ("tool", index, name, way)
    assert found.reason == "diverged"


@given(TEMPLATES, conversations(), st.data())
def test_an_edited_message_is_named(
    template: str, before: Conversation, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(before.messages) - 1))
    old = before.messages[number]
    way = data.draw(st.sampled_from(["changed", "inserted", "removed"]))
    edited = list(before.messages)
    if way == "changed":
        blocks = list(old.blocks)
        block = blocks[-1]
        if isinstance(block, ToolResult):
            blocks[-1] = ToolResult(block.call_id, [Text("entirely other")])
        elif isinstance(block, ToolCall):
            blocks[-1] = ToolCall(block.id, block.name, '{"path": "other"}', block.namespace)
        else:
            blocks[-1] = Text("entirely other")
        edited[number] = Message(old.role, blocks)
    elif way == "inserted":
        number = max(number, 1)
        old = data.draw(st.sampled_from(NEW))
        edited.insert(number, old)
    else:
        number = max(number, 1)
        old = before.messages[number]
        while number + 1 < len(edited) and _equal(edited[number + 1], old):
            number += 1
        del edited[number]
    found = change_of(template, before, Conversation(before.tools, edited))
    if found.change is None:
        return
    systems = sum(message.role == "system" for message in edited[:number])
    part, index = ("system", systems) if old.role == "system" else ("message", number - systems)
    assert named(found.change) == (part, index, old.role, way)


def _equal(one: Message, other: Message) -> bool:
    return one == other


@given(TEMPLATES, conversations(), st.data())
def test_thinking_that_was_taken_out_is_named(
    template: str, before: Conversation, data: st.DataObject
) -> None:
    thinking = [n for n, m in enumerate(before.messages) if isinstance(m.blocks[0], Thinking)]
    if not thinking:
        return
    number = data.draw(st.sampled_from(thinking))
    edited = list(before.messages)
    edited[number] = Message("assistant", edited[number].blocks[1:])
    found = change_of(template, before, Conversation(before.tools, edited))
    if found.change is not None:
        assert named(found.change) == ("thinking", number - 1, "assistant", "removed")
        assert found.reason == "thinking_not_returned"


NEW = [
    Message("user", [Text("never seen before")]),
    Message("system", [Text("never seen before")]),
    Message("assistant", [Text("ok"), ToolCall("n", "t0", '{"path": "ok"}')]),
    Message("tool", [ToolResult("n", [Text("never seen before")])]),
]
TURN = [
    Message("system", [Text("Be brief.")]),
    Message("user", [Text("Count the lines.")]),
]
READ = Tool("read", "Reads.", {"type": "object", "properties": {}}, "mcp__big")
OUTPUT = (
    "<think>\nIt is short.\n</think>\n\nI read it.\n<tool_call>\n"
    '{"name": "mcp__big__read", "arguments": {"path": "a", "lines": 5.0}}\n</tool_call>'
)
CALL = ToolCall("c", "read", '{"path": "a", "lines": 5.0}', "mcp__big")
RESULT = Message("tool", [ToolResult("c", [Text("It is short.")])])


def answered(*blocks: Any, output: str = OUTPUT, following: Message = RESULT) -> Any:
    """The comparison of the turn after an answer, which the client has returned as these blocks."""
    served = model("demo")
    old = earlier(prepared(request(TURN, [READ]), served), output)
    returned = [Message("assistant", list(blocks))] if blocks else []
    return compared(prepared(request([*TURN, *returned, following], [READ]), served), old)


def test_an_answer_that_comes_back_as_it_was_is_no_change() -> None:
    found = answered(Thinking("It is short."), Text("I read it."), CALL)
    assert found.change is None


def test_thinking_that_the_client_does_not_return_has_its_own_reason() -> None:
    found = answered(Text("I read it."), CALL)
    assert found.reason == "thinking_not_returned"
    assert named(found.change) == ("thinking", 1, "assistant", "not_returned")
    text_only = answered(
        Text("Five."),
        output="<think>\nIt is short.\n</think>\n\nFive.",
        following=Message("user", [Text("Thanks.")]),
    )
    assert text_only.reason == "thinking_not_returned"


@pytest.mark.parametrize(
    "arguments",
    ['{"path": "a", "lines": 5}', '{"lines": 5.0, "path": "a"}', '{"path": "b", "lines": 5.0}'],
)
def test_a_call_that_the_client_returns_with_other_arguments_is_named(arguments: str) -> None:
    call = ToolCall("c", "read", arguments, "mcp__big")
    found = answered(Thinking("It is short."), Text("I read it."), call)
    assert found.reason == "call_rewritten"
    assert named(found.change) == ("call", 1, "mcp__big__read", "rewritten")


def test_a_call_that_the_template_writes_otherwise_is_no_fault_of_the_client() -> None:
    compact = OUTPUT.replace('"path": "a"', '"path":"a"')
    found = answered(Thinking("It is short."), Text("I read it."), CALL, output=compact)
    assert found.reason == "rerendered"
    assert named(found.change) == ("message", 1, "assistant", "rerendered")


def test_calls_that_constrained_decoding_wrote_are_no_fault_of_the_client() -> None:
    guided = '[{"name": "mcp__big__read", "parameters": {"path": "a", "lines": 5.0}}]'
    assert answered(CALL, output=guided).reason == "rerendered"


def test_an_answer_with_other_words_or_without_any_has_changed() -> None:
    found = answered(Thinking("It is short."), Text("I read all."), CALL)
    assert (found.reason, *named(found.change)[:2]) == ("diverged", "message", 1)
    found = answered(following=Message("user", [Text("Never mind.")]))
    assert named(found.change) == ("message", 1, "assistant", "removed")


@given(TEMPLATES, conversations(), st.data())
def test_an_edit_is_named_although_turns_follow_it(
    template: str, before: Conversation, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(before.messages) - 1))
    edited = list(before.messages)
    blocks = [*edited[number].blocks[:-1], *edited[number].blocks[-1:]]
    block = blocks[-1]
    if isinstance(block, ToolCall):
        return
    new = Text("entirely other")
    blocks[-1] = ToolResult(block.call_id, [new]) if isinstance(block, ToolResult) else new
    role = edited[number].role
    edited[number] = Message(role, blocks)
    more = [Message("assistant", [Text(data.draw(TEXT))]), Message("user", [Text("Go on.")])]
    found = change_of(template, before, Conversation(before.tools, [*edited, *more]))
    if found.change is None:
        return
    part, index = ("system", 0) if role == "system" else ("message", number - 1)
    assert named(found.change) == (part, index, role, "changed")


class CountedText(str):
    """A text that counts the characters that are searched at most."""

    searched = 0

    def find(self, *arguments: Any) -> int:
        _, start, end = arguments
        CountedText.searched += end - start
        return super().find(*arguments)


def test_thousands_of_parts_that_the_template_does_not_show_cost_a_few_scans() -> None:
    hidden = [Message("user", [Text(f"message {number} <&>")]) for number in range(4000)]
    text = CountedText("message, escaped " * 8000)
    encoded = EncodedPrompt(text, (0, len(text)), (0, 4 * len(text)), b"\0" * 4 * len(text))
    locate(request(hidden, []), encoded, lambda tokens: "0" * (len(tokens) // 4), len(text) - 1)
    assert CountedText.searched <= (BUDGET + 1) * len(text)


# like Qwen3's: it shows thinking only after the last message of the user
DROPS = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endfor -%}
{%- set ns.users = 0 -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.users = ns.users + 1 -%}{%- endif -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content and ns.users > ns.last -%}
<think>
{{ m.reasoning_content }}
</think>

{% endif -%}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_thinking_that_the_template_leaves_out_is_no_fault_of_the_client() -> None:
    served = model("drops", DROPS)
    loop = [
        *TURN,
        Message("assistant", [Thinking("I must look at the file first."), CALL]),
        RESULT,
    ]
    old = earlier(prepared(request(loop, []), served), "<think>\nClear now.\n</think>\n\nFive.")
    answers: list[list[Block]] = [[Thinking("Clear now."), Text("Five.")], [Text("Five.")]]
    for answer in answers:
        now = [*loop, Message("assistant", answer), Message("user", [Text("Thanks.")])]
        found = compared(prepared(request(now, []), served), old)
        assert found.reason == "rerendered"
        assert named(found.change) == ("thinking", 1, "assistant", "rerendered")
    plain = [*TURN, Message("assistant", [Text("Five.")]), Message("user", [Text("Thanks.")])]
    old = earlier(prepared(request(TURN, []), served), "<think>\nClear now.\n</think>\n\nFive.")
    found = compared(prepared(request(plain, []), served), old)
    assert named(found.change) == ("thinking", 1, "assistant", "rerendered")
