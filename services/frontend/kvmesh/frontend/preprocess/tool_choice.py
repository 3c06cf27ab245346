"""Tool calls that the caller insists on: constrain the engine, and read what it then writes.

A choice left to the model constrains the calls of strict tools only, in the model's own form.

With `tool_choice` "required" or a named tool the engine is guided to write nothing but the
arguments (one tool possible) or a list of `{"name", "parameters"}` objects (several).
"""

import json
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.bus.messages import Guided
from kvmesh.frontend.conversation import (
    AnswerEvent,
    GenerateRequest,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kvmesh.frontend.dialects.output import OutputParser, call_id
from kvmesh.frontend.dialects.structural_tags import call_tags
from kvmesh.frontend.errors import InvalidRequest


class RequiredToolCall(Struct, frozen=True):
    """The tools of which at least one must be called."""

    tools: list[Tool]
    parallel: bool

    @property
    def guided(self) -> Guided:
        if len(self.tools) > 1:
            return Guided(kind="json_schema", value=_json(self._list_schema()))
        tool = self.tools[0]
        if tool.custom and tool.grammar:
            return Guided(kind="regex" if tool.regex else "grammar", value=tool.grammar)
        if tool.custom:
            return Guided(kind="regex", value="(.|\\n)+")
        return Guided(kind="json_schema", value=_json(_parameters(tool)))

    def _list_schema(self) -> dict[str, Any]:
        items = {"anyOf": [_call_schema(tool) for tool in self.tools]}
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, **most, "items": items}

    def parser(self, inner: OutputParser) -> OutputParser:
        """Reads calls from what `inner` takes for text; its thinking passes."""
        reader = _OneCall(self.tools[0]) if len(self.tools) == 1 else _Calls(self.tools)
        return _ForcedParser(inner, reader)


def required_tool_call(request: GenerateRequest) -> RequiredToolCall | None:
    """Raises InvalidRequest when the choice names no tool of the request."""
    choice = request.tool_choice
    if choice.mode in ("auto", "none"):
        return None
    tools = [t for t in request.tools if choice.mode == "required" or t.name == choice.name]
    if not tools:
        what = f"no tool is called `{choice.name}`" if choice.name else "there are no tools"
        raise InvalidRequest(f"`tool_choice` cannot be met: {what}.", "tool_choice")
    return RequiredToolCall(tools, request.parallel_tool_calls)


def optional(request: GenerateRequest, parser: str | None) -> Guided | None:
    """What holds the calls that the model may make, as `parser` reads them, to strict schemas."""
    if request.tool_choice.mode != "auto" or not any(tool.strict for tool in request.tools):
        return None
    tags = call_tags(parser, request.tools)
    return None if tags is None else Guided(kind="structural_tag", value=_json(tags))


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.parameters or {"type": "object"}


def _call_schema(tool: Tool) -> dict[str, Any]:
    parameters = {"type": "string"} if tool.custom else _parameters(tool)
    name = {"type": "string", "enum": [tool.name]}
    return {
        "type": "object",
        "properties": {"name": name, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


class _OneCall:
    """All text is the arguments of the one tool."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._started = False

    def feed(self, text: str) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if not self._started:
            text = text.lstrip()
            if not text:
                return []
            self._started = True
            events.append(_start(self._tool))
        return [*events, ToolCallDelta(text)]

    def finish(self) -> list[AnswerEvent]:
        return [ToolCallEnd()] if self._started else []


class _Calls:
    """The text is a list of calls; each is passed on when it is complete."""

    def __init__(self, tools: list[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._text = ""
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> list[AnswerEvent]:
        self._text += text
        events: list[AnswerEvent] = []
        while "}" in text:
            at = self._text.find("{")
            if at < 0:
                break
            try:
                value, end = self._decoder.raw_decode(self._text, at)
            except ValueError:
                break
            self._text = self._text[end:]
            events += self._call(value)
        return events

    def _call(self, value: dict[str, Any]) -> list[AnswerEvent]:
        tool = self._tools.get(str(value.get("name")))
        if tool is None:
            return [TextDelta(_json(value))]
        given = value.get("parameters", {})
        arguments = given if tool.custom and isinstance(given, str) else _json(given)
        return [_start(tool), ToolCallDelta(arguments), ToolCallEnd()]

    def finish(self) -> list[AnswerEvent]:
        rest, self._text = self._text.strip(" \n\r\t,[]"), ""
        return [TextDelta(rest)] if rest else []


def _start(tool: Tool) -> ToolCallStart:
    return ToolCallStart(call_id(), tool.name, tool.namespace, tool.custom)


class _ForcedParser:
    """Sends the text that one parser finds through another."""

    def __init__(self, inner: OutputParser, reader: "_OneCall | _Calls") -> None:
        self._inner = inner
        self._reader = reader

    def feed(self, text: str) -> list[AnswerEvent]:
        return self._read(self._inner.feed(text))

    def finish(self) -> list[AnswerEvent]:
        return self._read(self._inner.finish()) + self._reader.finish()

    def _read(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        found: list[AnswerEvent] = []
        for event in events:
            found += self._reader.feed(event.text) if isinstance(event, TextDelta) else [event]
        return found
