"""Every field of the internal form has a reader: it changes the prompt or the run."""

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from unit.frontend.apis.prompts import prepared

import kvmesh.frontend.service
from kvmesh.bus.messages import Sampling
from kvmesh.frontend import conversation
from kvmesh.frontend.conversation import (
    AttachedFile,
    Block,
    CacheControl,
    GenerateRequest,
    Image,
    Message,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolNotice,
    ToolResult,
)

ROOT = Path(kvmesh.frontend.service.__file__).parent
MARK = CacheControl(3600.0)
ASK, GO = Message("user", [Text("Ask")]), Message("user", [Text("Go")])
SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}}
TOOLS = [
    Tool("f", "Reads.", SCHEMA),
    Tool("g", "", SCHEMA),
    Tool("late", "", SCHEMA, deferred=True),
]


def talk(*messages: Message, tools: list[Tool] = TOOLS, **fields: Any) -> GenerateRequest:
    given = [ASK, *messages, GO]
    limits = Sampling(max_tokens=9)
    return GenerateRequest(
        id="i", model="m", sampling=limits, messages=given, tools=tools, **fields
    )


def said(*blocks: Block) -> GenerateRequest:
    return talk(Message("user", list(blocks)), Message("assistant", [Text("Yes")]))


def answered(*blocks: Block) -> GenerateRequest:
    return talk(Message("assistant", list(blocks)))


def called(*calls: ToolCall) -> GenerateRequest:
    results: list[Block] = [ToolResult("A", [Text("of A")]), ToolResult("B", [Text("of B")])]
    return talk(Message("assistant", list(calls)), Message("tool", results))


def returned(result: ToolResult) -> GenerateRequest:
    calls: list[Block] = [ToolCall("A", "f", "{}"), ToolCall("B", "g", "{}")]
    return talk(Message("assistant", calls), Message("tool", [ToolResult("B", []), result]))


def offered(**fields: Any) -> GenerateRequest:
    tool = Tool(**{"name": "f", "description": "Reads.", "parameters": SCHEMA, **fields})
    return talk(tools=[tool])


def chosen(choice: ToolChoice) -> GenerateRequest:
    return talk(tool_choice=choice)


def result(**fields: Any) -> GenerateRequest:
    return returned(ToolResult(**{"call_id": "A", "content": [Text("x")], **fields}))


def call(**fields: Any) -> GenerateRequest:
    given = {"id": "A", "name": "f", "arguments": '{"a": 1}', **fields}
    return called(ToolCall(**given), ToolCall("B", "g", "{}"))


def file(**fields: Any) -> GenerateRequest:
    return said(AttachedFile(**{"kind": "PDF document", **fields}))


GRAMMAR = {"custom": True, "parameters": {}, "grammar": "start: A"}
CHANGES: dict[str, tuple[GenerateRequest, GenerateRequest]] = {
    "CacheControl.ttl_s": (said(Text("a", MARK)), said(Text("a", CacheControl(60.0)))),
    "Text.text": (said(Text("a")), said(Text("b"))),
    "Text.cache": (said(Text("a")), said(Text("a", MARK))),
    "Thinking.text": (answered(Thinking("a"), Text("x")), answered(Thinking("b"), Text("x"))),
    "Image.cache": (said(Image("")), said(Image("", MARK))),
    "AttachedFile.kind": (file(), file(kind="video")),
    "AttachedFile.name": (file(), file(name="a.pdf")),
    "AttachedFile.context": (file(), file(context="of May")),
    "AttachedFile.cache": (file(), file(cache=MARK)),
    "ToolCall.id": (
        called(ToolCall("A", "f", "{}"), ToolCall("B", "g", "{}")),
        called(ToolCall("B", "f", "{}"), ToolCall("A", "g", "{}")),
    ),
    "ToolCall.name": (call(), call(name="other")),
    "ToolCall.arguments": (call(), call(arguments="{}")),
    "ToolCall.namespace": (call(), call(namespace="n")),
    "ToolCall.custom": (call(), call(custom=True)),
    "ToolCall.cache": (call(), call(cache=MARK)),
    "ToolResult.call_id": (result(), result(call_id="C")),
    "ToolResult.content": (result(), result(content=[Text("y")])),
    "ToolResult.is_error": (result(), result(is_error=True)),
    "ToolResult.references": (result(), result(references=["late"])),
    "ToolResult.cache": (result(), result(cache=MARK)),
    "ToolNotice.name": (said(ToolNotice("late")), said(ToolNotice("f"))),
    "ToolNotice.removed": (said(ToolNotice("late")), said(ToolNotice("late", True))),
    "Message.role": (
        talk(GO, Message("user", [Text("x")])),
        talk(GO, Message("assistant", [Text("x")])),
    ),
    "Message.blocks": (talk(GO), talk(ASK)),
    "Tool.name": (offered(), offered(name="g")),
    "Tool.description": (offered(), offered(description="Writes.")),
    "Tool.parameters": (offered(), offered(parameters={})),
    "Tool.namespace": (offered(), offered(namespace="n")),
    "Tool.strict": (offered(), offered(strict=True)),
    "Tool.custom": (offered(), offered(custom=True)),
    "Tool.grammar": (offered(custom=True, parameters={}), offered(**GRAMMAR)),
    "Tool.regex": (offered(**GRAMMAR), offered(**GRAMMAR, regex=True)),
    "Tool.deferred": (offered(), offered(deferred=True)),
    "Tool.cache": (offered(), offered(cache=MARK)),
    "ToolChoice.mode": (chosen(ToolChoice()), chosen(ToolChoice("required"))),
    "ToolChoice.allowed": (
        chosen(ToolChoice("required", ("f",))),
        chosen(ToolChoice("required", ("g",))),
    ),
}
WITHOUT_READER = {"Image.url": "no engine reads images yet"}
# Read where the run or its report is made, by an attribute of this name.
ELSEWHERE = (
    conversation.ImageFile,
    conversation.GenerateRequest,
    conversation.Generated,
    conversation.ContextEdits,
    conversation.ClearThinking,
    conversation.ClearToolUses,
    conversation.Compact,
    conversation.ConversationSummary,
)
EVENTS = (
    conversation.TextDelta,
    conversation.ThinkingDelta,
    conversation.ToolCallStart,
    conversation.ToolCallDelta,
    conversation.ToolCallEnd,
)


def structs() -> list[type[Struct]]:
    return [
        kind
        for _, kind in inspect.getmembers(conversation, inspect.isclass)
        if issubclass(kind, Struct) and kind.__module__ == conversation.__name__
    ]


FIELDS = [f"{kind.__name__}.{name}" for kind in structs() for name in kind.__struct_fields__]


@pytest.mark.parametrize("field", [f for f in FIELDS if f in CHANGES])
def test_a_field_changes_the_prompt_or_its_run(field: str) -> None:
    assert outcome(CHANGES[field][0]) != outcome(CHANGES[field][1])


def outcome(request: GenerateRequest) -> tuple[Any, ...]:
    made = prepared(msgspec.structs.replace(request))
    assert made.encoded is not None
    prompts = [prompt.retention for prompt in made.prompts]
    form = made.form.calls, made.form.callable, made.form.parallel, made.form.text
    return made.encoded.text, prompts, made.form.constraint(), form, made.decode


def test_every_field_has_a_reader() -> None:
    unread = [
        f"{kind.__name__}.{name}"
        for kind in structs()
        for name in kind.__struct_fields__
        if f"{kind.__name__}.{name}" not in {*CHANGES, *WITHOUT_READER}
        and not (kind in EVENTS and name in read_in("apis"))
        and not (kind in ELSEWHERE and name in read_in("."))
        and (kind, name) != (Message, "generated")
    ]
    assert unread == []


@cache
def read_in(folder: str) -> frozenset[str]:
    """Names of the attributes that modules of a folder read, except those that translate bodies."""
    names: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        if path.name not in ("conversation.py", "body.py", "blocks.py"):
            tree = ast.walk(ast.parse(path.read_text()))
            names |= {
                n.attr for n in tree if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
            }
    return frozenset(names)
