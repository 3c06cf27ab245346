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
        _written(render, today, arguments, thinking)
        for arguments, thinking in (({}, ""), (ARGUMENTS, ""), (ARGUMENTS, THOUGHT))
    )
    return [written for written in found if written is not None]


def _written(
    render: RenderProbe, today: datetime.date, arguments: dict[str, str], thinking: str
) -> WrittenCall | None:
    call = ToolCall("sample", NAME, json.dumps(arguments))
    turn: list[Block] = [Thinking(thinking), call] if thinking else [call]
    request = GenerateRequest(
        id="", model="", sampling=Sampling(max_tokens=0), messages=[_ASKED], tools=[TOOL]
    )
    back = Message("tool", [ToolResult("sample", [Text(_RESULT)])])
    try:
        prompt = render(request, today, [_ASKED])
        whole = render(request, today, [_ASKED, Message("assistant", turn), back], invites=False)
    except TemplateError:
        return None
    end = whole.rfind(_RESULT)
    start = generated_from(prompt, whole)
    output = whole[start:end]
    return WrittenCall(arguments, (whole[:start], prompt), output) if NAME in output else None


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
