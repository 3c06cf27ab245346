"""Event emitter of a parser: trims white space, joins deltas, holds back uncertain calls."""

import json
from collections.abc import Callable

from kvmesh.frontend.conversation import (
    GAP,
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

# The emitter holds back white space that may belong to a marker; longer white space is text.
MAX_SPACE = 1024
Delta = type[TextDelta] | type[ThinkingDelta] | type[ToolCallDelta]


class Emitter:
    """Collects the events of one output; `drain` returns those that are certain.

    A call is certain from its first arguments on if `eager`, else once it is complete. White
    space next to thinking and calls belongs to the format and is dropped; a gap separates two texts
    with nothing between them.
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
        self._trim_start = False
        self.has_text = False
        self._after: Delta | None = None
        self._attempt_chars = 0
        self._name: str | None = None
        self._arguments: list[str] = []
        self._started = False

    def drain(self) -> list[AnswerEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def continue_delta(self, text: str, kind: Delta) -> list[AnswerEvent]:
        """`write` and `drain` in one, for text or thinking that continues a drained delta."""
        text = self._space + text
        body = text.rstrip(SPACE)
        self._space = text[len(body) :]
        if len(self._space) > MAX_SPACE:
            body, self._space = text, ""
        self._kind = kind
        return [kind(body)] if body else []

    # --- text and thinking ---

    def write(self, text: str, kind: Delta = TextDelta) -> None:
        whole = self._space + text
        body = whole.rstrip(SPACE)
        self._space = whole[len(body) :]
        if not self.has_text and self._trim_start:
            body = body.lstrip(SPACE)
            self._space = self._space if body else ""
        elif len(self._space) > MAX_SPACE:
            body, self._space = whole, ""
        if body:
            self.has_text = True
            self._add(kind, body)

    def boundary(self) -> None:
        """Thinking, a call or another message begins or ends here."""
        self._after = self._kind if self.has_text else self._after
        self._space = ""
        self._trim_start = True
        self.has_text = False

    def finish(self) -> None:
        """Flush at the end of the output, where trailing white space is part of the text."""
        if self._space and self._kind is TextDelta:
            self._add(TextDelta, self._space)

    def _add(self, kind: Delta, text: str) -> None:
        if self._after is not None:
            # the second of two texts, or of two thoughts, with nothing between them
            text = GAP + text if kind is self._after else text
            self._after = None
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

    def begin_attempt(self, back: int) -> None:
        """Set the point to return to if the call fails: before a marker of `back` characters."""
        self._source.mark(back)
        self._attempt_chars = max(back, 1)
        self._name = None
        self._arguments.clear()
        self._started = False

    @property
    def attempting(self) -> bool:
        return self._attempt_chars > 0

    def fail_attempt(self, kind: Delta = TextDelta) -> bool:
        """Emit the marker of a failed call and rewind the source to its end.

        False for a call whose start was already emitted, which stays as it is.
        """
        if not self.attempting:
            self._source.rewind()
            self.boundary()
            return False
        source, length = self._source, self._attempt_chars
        source.rewind()
        self._attempt_chars = 0
        text, source.pos = source.text[:length], length
        self.write(text, kind)
        return True

    def end_attempt(self) -> None:
        """Forget the point to return to."""
        self._source.release()
        self._attempt_chars = 0

    def hold(self) -> None:
        if not self.attempting:
            self._source.mark()

    def let_go(self) -> None:
        if not self.attempting:
            self._source.release()

    def name(self, name: str) -> None:
        self._name = name

    def arguments(self, text: str) -> None:
        self._arguments.append(text)
        if self._eager and not self._started:
            self._start()
        if self._started and not self._is_custom():
            self._emit_arguments()

    def end(self) -> None:
        if not self._started:
            self._start()
        self._emit_arguments()
        self._flush()
        self._events.append(ToolCallEnd())
        self._source.release()
        self._started = False

    def schema(self) -> Schema:
        tool = self._tools.get(self._name or "")
        return schema(tool) if tool else {}

    def known(self, name: str) -> bool:
        return not self._tools or name in self._tools

    def _start(self) -> None:
        self.end_attempt()
        self.boundary()
        self._after = None
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

    def _emit_arguments(self) -> None:
        text = "".join(self._arguments)
        self._arguments.clear()
        self._add(ToolCallDelta, free_text(text) if self._is_custom() else text)


def free_text(arguments: str) -> str:
    """The input of a free-text tool, taken from the object in which the model wraps it."""
    fields = json.loads(arguments)
    if isinstance(fields.get(CUSTOM_INPUT), str):
        return str(fields[CUSTOM_INPUT])
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else arguments
