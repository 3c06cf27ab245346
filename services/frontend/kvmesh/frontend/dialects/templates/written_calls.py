"""Tool calls as a template writes them, which the parser of its model must read. Pure."""

import datetime
import json
from itertools import takewhile
from typing import NamedTuple

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.templates.frame_probe import RenderProbe

NAME, THOUGHT = "sample_tool", "sample thought"
ARGUMENTS = {"text": "one\ntwo", "place": "here"}
_KINDS = {name: {"type": "string"} for name in ARGUMENTS}
TOOL = Tool(NAME, "", {"type": "object", "properties": _KINDS})
_RESULT = "sample result"
_ASKED = Message("user", [Text("sample question")])
_REQUEST = GenerateRequest(
    id="", model="", sampling=Sampling(max_tokens=0), messages=[_ASKED], tools=[TOOL]
)


class WrittenCall(NamedTuple):
    """A turn with a call with `arguments`: `output` as a model would generate it.

    The model's prompt is one of `prompts`: the part before `output`, or that which invites an
    answer, if the template writes past turns otherwise. Text of others may follow a call.
    """

    arguments: dict[str, str]
    prompts: tuple[str, ...]
    output: str


def written_calls(render: RenderProbe, today: datetime.date) -> list[WrittenCall]:
    """Turns that call `TOOL`: without arguments, with ARGUMENTS, and with thinking, if shown."""
    found = (
        written_turn(render, today, [arguments], thinking)
        for arguments, thinking in (({}, ""), (ARGUMENTS, ""), (ARGUMENTS, THOUGHT))
    )
    return [written for written in found if written is not None]


def written_turn(
    render: RenderProbe, today: datetime.date, calls: list[dict[str, str]], thinking: str = ""
) -> WrittenCall | None:
    """A turn that calls `TOOL` with each of these arguments; None if the template refuses it."""
    made = [
        ToolCall(f"sample{number}", NAME, json.dumps(each)) for number, each in enumerate(calls)
    ]
    turn: list[Block] = [*([Thinking(thinking)] if thinking else []), *made]
    back = [Message("tool", [ToolResult(call.id, [Text(_RESULT)])]) for call in made]
    try:
        prompt = render(_REQUEST, today, [_ASKED])
        whole = render(_REQUEST, today, [_ASKED, Message("assistant", turn), *back], invites=False)
    except TemplateError:
        return None
    end = whole.find(_RESULT)
    start = generated_from(prompt, whole)
    output = whole[start:end]
    return WrittenCall(calls[0], (whole[:start], prompt), output) if NAME in output else None


def after_answer(render: RenderProbe, today: datetime.date) -> str:
    """The text that the template writes behind an answer without calls; empty if it refuses it."""
    answer = Message("assistant", [Text(_RESULT)])
    return _rendered(render, today, [_ASKED, answer, _ASKED]).partition(_RESULT)[2]


def between_results(render: RenderProbe, today: datetime.date) -> str:
    """The text that the template writes between the results of two calls."""
    calls = [ToolCall(f"sample{number}", NAME, json.dumps(ARGUMENTS)) for number in range(2)]
    back = [Message("tool", [ToolResult(call.id, [Text(_RESULT)])]) for call in calls]
    whole = _rendered(render, today, [_ASKED, Message("assistant", [*calls]), *back])
    return whole.split(_RESULT)[1] if whole.count(_RESULT) > 1 else ""


def _rendered(render: RenderProbe, today: datetime.date, conversation: list[Message]) -> str:
    """The conversation as the template writes it, without an invitation; empty if it refuses."""
    try:
        return render(_REQUEST, today, conversation, invites=False)
    except TemplateError:
        return ""


def generated_from(prompt: str, whole: str) -> int:
    """The offset of the model's part of `whole`: behind what the prompt shows of the turn."""
    if whole.startswith(prompt):
        return len(prompt)
    shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
    )
    begun = whole.rfind("<", 0, shared)
    if begun > whole.rfind(">", 0, shared):
        shared = begun  # it shares only a part of a marker
    rest = prompt[shared:]
    ends = (rest[i:] for i in range(len(rest)) if whole.startswith(rest[i:], shared))
    return shared + len(next(ends, ""))
