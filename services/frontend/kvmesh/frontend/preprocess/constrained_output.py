"""Parsers of constrained output, which stay right for engines that ignore the constraint. Pure."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvmesh.frontend.conversation import (
    AnswerEvent,
    TextDelta,
    ThinkingDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    is_object,
)
from kvmesh.frontend.dialects.output import OutputParser, call_id
from kvmesh.frontend.dialects.tools import by_model_name, model_name

TOOL_CALLS = "tool_calls"
SHOWN = 64  # characters that tell how an output begins
JSON_STARTS = ('{"', "{}", "[{", "[[", '["', "[]")
ARRAY_STARTS = ("[-", *(f"[{digit}" for digit in range(10)), "[true", "[false", "[null")


class TextReader(NamedTuple):
    """The beginnings of a constrained text, without white space, and the reader of such a text."""

    starts: tuple[str, ...]
    reader: OutputParser


class OneToolReader:
    """Reads all text as the arguments of one tool.

    Arguments that break off have no `ToolCallEnd` if `eager`, else they are text. Those of a custom
    tool are free text, which does not show whether it is whole: they have no end either.
    """

    in_call = True

    def __init__(self, tool: Tool, eager: bool) -> None:
        self._tool = tool
        self._eager = eager or tool.custom
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[AnswerEvent]:
        started = bool(self._pieces)
        text = text if started else text.lstrip()
        if not text:
            return []
        self._pieces.append(text)
        if not self._eager:
            return []
        return [ToolCallDelta(text)] if started else [_start(self._tool), ToolCallDelta(text)]

    def finish(self) -> list[AnswerEvent]:
        text = "".join(self._pieces)
        if not text or self._tool.custom:
            return []
        whole = is_object(text)
        if self._eager:
            return [ToolCallEnd()] if whole else []
        call: list[AnswerEvent] = [_start(self._tool), ToolCallDelta(text), ToolCallEnd()]
        return call if whole else [TextDelta(text)]


class CallListReader:
    """Reads text as a list of calls; emits each call once it is complete."""

    in_call = True

    def __init__(self, tools: list[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools} | by_model_name(tools)
        self._text = ""
        self._opened = False
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> list[AnswerEvent]:
        self._text += text
        if not self._opened:
            _, opening, after = self._text.partition("[")
            if not opening:
                return []
            text = self._text = after
            self._opened = True
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
        parameters = value.get("parameters", value.get("arguments", {}))
        plain = tool.custom and isinstance(parameters, str)
        arguments = parameters if plain else _json(parameters)
        return [_start(tool), ToolCallDelta(arguments), ToolCallEnd()]

    def finish(self) -> list[AnswerEvent]:
        rest, self._text = self._text.strip(" \n\r\t,[]}"), ""
        return [TextDelta(rest)] if rest else []


class ConstrainedParser:
    """Reads the text events of `thinking`, which splits off the thinking, as they begin.

    A text that begins as none of `readings` does, or with one of `openers`, goes to `own`: engines
    without guided decoding write calls in the model's own syntax.
    """

    def __init__(
        self,
        thinking: OutputParser,
        readings: Sequence[TextReader],
        own: OutputParser,
        openers: tuple[str, ...] = (),
    ) -> None:
        self._thinking = thinking
        self._readings = readings
        self._own = own
        self._openers = openers
        self._reader: OutputParser | None = None
        self._held = ""  # text that does not show yet how it is to be read

    @property
    def in_call(self) -> bool:
        return self._reader is not None and self._reader.in_call

    def feed(self, text: str) -> list[AnswerEvent]:
        return self._read(self._thinking.feed(text))

    def finish(self) -> list[AnswerEvent]:
        read = self._read(self._thinking.finish())
        reader = self._reader
        if reader is None:
            reader = self._own
            read += reader.feed(self._held)
        return read + reader.finish()

    def _read(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        read: list[AnswerEvent] = []
        for event in events:
            if not isinstance(event, TextDelta):
                read.append(event)
                continue
            text = event.text
            if self._reader is None:
                text = self._held = self._held + text
                self._reader = self._chosen()
                if self._reader is None:
                    continue
            read += self._reader.feed(text)
        return read

    def _chosen(self) -> OutputParser | None:
        """The reader of the held text, None if it may still begin in two ways."""
        begin = self._held.lstrip()
        compact = "".join(begin[:SHOWN].split())
        if any(begin.startswith(opener) for opener in self._openers):
            return self._own
        if not begin or any(opener.startswith(begin) for opener in self._openers):
            return None
        for starts, reader in self._readings:
            if compact.startswith(starts):
                return reader
            if any(start.startswith(compact) for start in starts):
                return None
        return self._own


class AnswerOpening:
    """Decides whether an output that may begin with thinking does.

    `starts` begin an answer at once. `unmarked`: all other text is thinking only if one of `ends`
    follows, and held until then: the constraint forbids thinking, but an engine may exempt it.
    `parser` makes the parser of the whole output with thinking, or without.
    """

    def __init__(
        self,
        parser: Callable[[bool], OutputParser],
        starts: tuple[str, ...],
        ends: tuple[str, ...],
        unmarked: bool,
    ) -> None:
        self._make = parser
        self._starts = starts
        self._ends = ends
        self._unmarked = unmarked
        self._held = ""
        self._parser: OutputParser | None = None

    @property
    def in_call(self) -> bool:
        return self._parser is not None and self._parser.in_call

    def feed(self, text: str) -> list[AnswerEvent]:
        if self._parser is not None:
            return self._parser.feed(text)
        searched = max(0, len(self._held) - max(map(len, self._ends)))
        self._held += text
        thinks = self._thinks(searched)
        return [] if thinks is None else self._decided(thinks).feed(self._held)

    def finish(self) -> list[AnswerEvent]:
        if self._parser is not None:
            return self._parser.finish()
        parser = self._decided(not self._unmarked)
        return parser.feed(self._held) + parser.finish()

    def _thinks(self, searched: int) -> bool | None:
        compact = "".join(self._held[:SHOWN].split())
        if compact.startswith(self._starts):
            return False
        if any(start.startswith(compact) for start in self._starts):
            return None
        if not self._unmarked:
            return True
        return True if any(self._held.find(e, searched) >= 0 for e in self._ends) else None

    def _decided(self, thinks: bool) -> OutputParser:
        self._parser = self._make(thinks)
        return self._parser


class AllowedCalls:
    """Drops the calls of a parser but for those of tools with these `names`, as models call them.

    A call that the model must not make is of no use to a client, not even as text. The texts around
    it stay apart. Without names, what begins with one of `openers` and breaks off is such a call.
    """

    def __init__(
        self, parser: OutputParser, names: frozenset[str], openers: tuple[str, ...] = ()
    ) -> None:
        self._parser = parser
        self._names = names
        self._openers = openers
        self._dropping = False
        self._gap = False
        self._wrote = False

    @property
    def in_call(self) -> bool:
        return self._parser.in_call

    def feed(self, text: str) -> list[AnswerEvent]:
        return self._allowed(self._parser.feed(text))

    def finish(self) -> list[AnswerEvent]:
        events = self._parser.finish()
        if not self._names:
            events = [event for event in events if not self._is_call(event)]
        return self._allowed(events)

    def _is_call(self, event: AnswerEvent) -> bool:
        return isinstance(event, TextDelta) and event.text.lstrip().startswith(self._openers)

    def _allowed(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        passed: list[AnswerEvent] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                self._dropping = model_name(event.name, event.namespace) not in self._names
                self._gap = self._dropping and self._wrote
            if isinstance(event, TextDelta):
                passed.append(TextDelta(f"\n{event.text}") if self._gap else event)
                self._gap, self._wrote = False, True
            elif not self._dropping or isinstance(event, ThinkingDelta):
                passed.append(event)
        return passed


def _start(tool: Tool) -> ToolCallStart:
    return ToolCallStart(call_id(), tool.name, tool.namespace, tool.custom)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
