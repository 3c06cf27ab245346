"""From what a grammar finds to answer events: trims, joins deltas, holds calls that may fail."""

import json
from collections.abc import Callable

from kvmesh.frontend.conversation import (
    AnswerEvent,
    TextDelta,
    ThinkingDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kvmesh.frontend.dialects.parsing.coerce import Schema
from kvmesh.frontend.dialects.parsing.source import SPACE, OutputSource
from kvmesh.frontend.dialects.tools import CUSTOM_INPUT, by_model_name, schema

# White space may belong to the marker behind it; so much of it is text.
MAX_SPACE = 1024
Delta = type[TextDelta] | type[ThinkingDelta] | type[ToolCallDelta]


class Emitter:
    """Collects the events of one output; `take` hands over those that are certain.

    A call is certain from its first arguments on if `eager`, else when it is complete. White
    space next to thinking and calls belongs to the format, not to the text.
    """

    def __init__(
        self, source: OutputSource, tools: list[Tool], eager: bool, new_id: Callable[[], str]
    ) -> None:
        self._source = source
        self._tools = by_model_name(tools)
        self._eager = eager
        self._new_id = new_id
        self._events: list[AnswerEvent] = []
        self._parts: list[str] = []
        self._kind: Delta = TextDelta
        self._space = ""
        self._trim = False
        self.spoken = False
        self._forced = 0
        self._name: str | None = None
        self._arguments: list[str] = []
        self._started = False

    def take(self) -> list[AnswerEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def pass_on(self, text: str, kind: Delta) -> list[AnswerEvent]:
        """`say` and `take` in one, within text or thinking that has begun and was taken."""
        text = self._space + text
        kept = text.rstrip(SPACE)
        self._space = text[len(kept) :]
        if len(self._space) > MAX_SPACE:
            kept, self._space = text, ""
        self._kind = kind
        return [kind(kept)] if kept else []

    # --- text and thinking ---

    def say(self, text: str, kind: Delta = TextDelta) -> None:
        whole = self._space + text
        kept = whole.rstrip(SPACE)
        self._space = whole[len(kept) :]
        if not self.spoken and self._trim:
            kept = kept.lstrip(SPACE)
            self._space = self._space if kept else ""
        elif len(self._space) > MAX_SPACE:
            kept, self._space = whole, ""
        if kept:
            self.spoken = True
            self._add(kind, kept)

    def turn(self) -> None:
        """Thinking or a call begins or ends here."""
        self._space = ""
        self._trim = True
        self.spoken = False

    def finish(self) -> None:
        """The output is over; white space at the end of a text is part of it."""
        if self._space and self._kind is TextDelta:
            self._add(TextDelta, self._space)

    def _add(self, kind: Delta, text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if text:
            self._events.append(self._kind(text))

    # --- calls ---

    def attempt(self, back: int) -> None:
        """A call may begin here, or have begun with a marker of `back` characters."""
        self._source.keep(back)
        self._forced = max(back, 1)
        self._name = None
        self._arguments.clear()
        self._started = False

    @property
    def attempting(self) -> bool:
        return self._forced > 0

    def fail(self) -> None:
        """It was no call: what looked like its beginning is text, what follows is read again."""
        if not self.attempting:
            self.turn()
            return
        source, forced = self._source, self._forced
        source.rewind()
        self._forced = 0
        text, source.pos = source.text[:forced], forced
        self.say(text)

    def drop_attempt(self) -> None:
        """There is nothing to be rewound to."""
        self._source.release()
        self._forced = 0

    def name(self, name: str) -> None:
        self._name = name

    def arguments(self, text: str) -> None:
        self._arguments.append(text)
        if self._eager and not self._started:
            self._start()
        if self._started and not self._is_custom():
            self._pass_on()

    def end(self) -> None:
        if not self._started:
            self._start()
        self._pass_on()
        self._flush()
        self._events.append(ToolCallEnd())
        self._started = False

    def schema(self) -> Schema:
        tool = self._tools.get(self._name or "")
        return schema(tool) if tool else {}

    def known(self, name: str) -> bool:
        return not self._tools or name in self._tools

    def _start(self) -> None:
        self.drop_attempt()
        self.turn()
        self._flush()
        name = self._name or ""
        tool = self._tools.get(name)
        call = ToolCallStart(self._new_id(), name)
        if tool is not None:
            call = ToolCallStart(call.id, tool.name, tool.namespace, tool.custom)
        self._events.append(call)
        self._started = True

    def _is_custom(self) -> bool:
        tool = self._tools.get(self._name or "")
        return tool is not None and tool.custom

    def _pass_on(self) -> None:
        text = "".join(self._arguments)
        self._arguments.clear()
        self._add(ToolCallDelta, free_text(text) if self._is_custom() else text)


def free_text(arguments: str) -> str:
    """The input of a free-text tool, from the object that the model wraps it in."""
    fields = json.loads(arguments)
    if isinstance(fields.get(CUSTOM_INPUT), str):
        return str(fields[CUSTOM_INPUT])
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else arguments
