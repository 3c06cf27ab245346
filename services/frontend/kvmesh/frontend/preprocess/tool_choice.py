"""Constraints that `tool_choice` puts on an engine, and the parsers of constrained output.

With `tool_choice` "required" or a named tool, a constraint makes the engine write nothing but the
arguments (one tool possible) or a list of `{"name", "parameters"}` objects (several). With "auto",
structural tags constrain calls of strict tools, in the model's own call syntax.
"""

import json
import re
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
    """The tools of which the model must call at least one."""

    tools: list[Tool]
    parallel: bool

    @property
    def guided(self) -> Guided:
        """The constraint under which the engine writes nothing but calls."""
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
        limit = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, **limit, "items": items}

    def parser(self, inner: OutputParser, own: OutputParser) -> OutputParser:
        """A parser that reads the text events of `inner` as calls and passes on its thinking.

        Engines without guided decoding write calls in the model's own syntax, which `own` reads.
        """
        several = len(self.tools) > 1
        reader = _CallListReader(self.tools) if several else _ArgumentsReader(self.tools[0])
        return _RequiredCallParser(inner, reader, own)


def required_tool_call(request: GenerateRequest) -> RequiredToolCall | None:
    """None for "auto" and "none"; raises InvalidRequest if no tool of the request qualifies."""
    choice = request.tool_choice
    if choice.mode in ("auto", "none"):
        return None
    tools = [t for t in request.tools if choice.mode == "required" or t.name == choice.name]
    if not tools:
        reason = f"no tool is named `{choice.name}`" if choice.name else "the request has no tools"
        raise InvalidRequest(f"`tool_choice` cannot be satisfied: {reason}.", "tool_choice")
    return RequiredToolCall(tools, request.parallel_tool_calls)


def strict_tool_tags(request: GenerateRequest, parser: str | None) -> Guided | None:
    """The constraint of optional calls, in the syntax of `parser`, to schemas of strict tools.

    None if no tool is strict or the syntax has no structural tags.
    """
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


class _ArgumentsReader:
    """Reads all text as the arguments of one tool."""

    in_call = True

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._started = False
        self.begins = re.compile("" if tool.custom else "{")

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


class _CallListReader:
    """Reads text as a list of calls; emits each call once it is complete."""

    in_call = True
    begins = re.compile(r"\[\s*[{\]]")

    def __init__(self, tools: list[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._text = ""
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> list[AnswerEvent]:
        self._text += text
        events: list[AnswerEvent] = []
        while "}" in text:
            start = self._text.find("{")
            if start < 0:
                break
            try:
                value, end = self._decoder.raw_decode(self._text, start)
            except ValueError:
                break
            self._text = self._text[end:]
            events += self._call(value)
        return events

    def _call(self, value: dict[str, Any]) -> list[AnswerEvent]:
        tool = self._tools.get(str(value.get("name")))
        if tool is None:
            return [TextDelta(_json(value))]
        parameters = value.get("parameters", {})
        plain = tool.custom and isinstance(parameters, str)
        arguments = parameters if plain else _json(parameters)
        return [_start(tool), ToolCallDelta(arguments), ToolCallEnd()]

    def finish(self) -> list[AnswerEvent]:
        rest, self._text = self._text.strip(" \n\r\t,[]"), ""
        return [TextDelta(rest)] if rest else []


def _start(tool: Tool) -> ToolCallStart:
    return ToolCallStart(call_id(), tool.name, tool.namespace, tool.custom)


class _RequiredCallParser:
    """Sends the text events of one parser through a reader of calls.

    Text that does not begin as the reader's calls do goes to `own`.
    """

    def __init__(
        self,
        inner: OutputParser,
        reader: "_ArgumentsReader | _CallListReader",
        own: OutputParser,
    ) -> None:
        self._inner = inner
        self._reader: OutputParser = reader
        self._begins = reader.begins
        self._own = own
        self._held: str | None = ""  # text that does not show yet in which syntax it is

    @property
    def in_call(self) -> bool:
        return True

    def feed(self, text: str) -> list[AnswerEvent]:
        return self._read(self._inner.feed(text))

    def finish(self) -> list[AnswerEvent]:
        read = self._read(self._inner.finish())
        if self._held:
            read += self._own.feed(self._held)
            self._reader = self._own
        return read + self._reader.finish()

    def _read(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        read: list[AnswerEvent] = []
        for event in events:
            if not isinstance(event, TextDelta):
                read.append(event)
                continue
            text = event.text
            if self._held is not None:
                self._held += text
                begin = self._held.lstrip()
                if begin in ("", "["):
                    continue
                if not self._begins.match(begin):
                    self._reader = self._own
                text, self._held = self._held, None
            read += self._reader.feed(text)
        return read
