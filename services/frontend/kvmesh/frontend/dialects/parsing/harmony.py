"""Parser of gpt-oss's "harmony" response format: messages on channels, calls by recipient.

A message is `<|start|>` HEADER `<|message|>` CONTENT and an end token; the header may name a
channel (`<|channel|>analysis`, `commentary`, `final`) and a recipient (`to=functions.NAME`). The
parser reads the text of special tokens, not their ids, and so needs no vocabulary file.
"""

import re
from collections.abc import Callable

from kvmesh.frontend.conversation import AnswerEvent, TextDelta, ThinkingDelta, Tool
from kvmesh.frontend.dialects.parsing.emitter import Delta, Emitter
from kvmesh.frontend.dialects.parsing.literals import JSON, Transcoder
from kvmesh.frontend.dialects.parsing.source import (
    MalformedOutput,
    MarkerSet,
    OutputSource,
    Steps,
    Unfinished,
)

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
MAX_HEADER = 512

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/\-]+)")
_FUNCTION = re.compile(r"\bto=functions\.")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """Maps the analysis channel to thinking, messages to functions to calls, all else to text."""

    def __init__(self, tools: list[Tool], new_id: Callable[[], str], eager: bool) -> None:
        self._source = OutputSource()
        self._emitter = Emitter(self._source, tools, eager, new_id)
        self._has_tools = bool(tools)
        self._starts = MarkerSet([START, CHANNEL, MESSAGE, *ENDS])
        self._header_ends = MarkerSet([MESSAGE, START, *ENDS])
        self._body_ends = MarkerSet([START, *ENDS])
        self._steps = self._run()

    def feed(self, text: str) -> list[AnswerEvent]:
        self._source.feed(text)
        next(self._steps, None)
        return self._emitter.drain()

    @property
    def in_call(self) -> bool:
        return self._emitter.attempting

    def finish(self) -> list[AnswerEvent]:
        self._source.closed = True
        next(self._steps, None)
        return self._emitter.drain()

    def _run(self) -> Steps[None]:
        source, emitter = self._source, self._emitter
        try:
            while True:
                text, stop = yield from source.until(self._starts)
                emitter.write(text)
                if stop in (START, CHANNEL, MESSAGE):
                    source.pos -= len(stop or "")
                    yield from self._message()
        except Unfinished:
            pass
        if emitter.attempting:
            source.rewind()
            emitter.write(source.text)
        emitter.finish()

    def _message(self) -> Steps[None]:
        header = yield from self._header()
        if header is None:
            return
        self._emitter.boundary()
        recipient = _RECIPIENT.search(header)
        if recipient and (_FUNCTION.search(header) or self._is_tool(recipient[1])):
            yield from self._call(recipient[1])
        channel = _CHANNEL.search(header)
        thinking = channel is not None and channel[1] == "analysis"
        yield from self._body(ThinkingDelta if thinking else TextDelta)
        self._emitter.boundary()

    def _is_tool(self, name: str) -> bool:
        return self._has_tools and self._emitter.known(name)

    def _header(self) -> Steps[str | None]:
        """Read up to the content; None if no content follows, with the header emitted as text."""
        source = self._source
        source.mark()
        yield from source.literal(START)
        header, stop = "", None
        while stop is None and len(header) <= MAX_HEADER:
            text, stop = yield from source.until(self._header_ends)
            header += text
        if stop == MESSAGE:
            source.release()
            return header
        if stop is not None:
            source.pos -= len(stop)
        source.release()
        self._emitter.write(header)
        return None

    def _call(self, name: str) -> Steps[None]:
        """Read a call; content that is not a JSON object is left to be read as text."""
        source, emitter = self._source, self._emitter
        emitter.begin_attempt(0)
        emitter.name(name)
        try:
            if (yield from source.skip_space()) != "{":
                raise MalformedOutput
            yield from Transcoder(source, emitter.arguments, JSON, ENDS).object()
            emitter.end()
        except Unfinished:
            raise
        except MalformedOutput:
            emitter.fail_attempt()

    def _body(self, kind: Delta) -> Steps[None]:
        stop = None
        while stop is None:
            text, stop = yield from self._source.until(self._body_ends)
            self._emitter.write(text, kind)
        if stop == START:
            self._source.pos -= len(START)
