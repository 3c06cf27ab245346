"""The streaming parser of every family whose grammar is data."""

import re
from collections.abc import Callable

from kvmesh.frontend.conversation import AnswerEvent, TextDelta, ThinkingDelta, Tool
from kvmesh.frontend.dialects.grammar import Calls, Reasoning, opening
from kvmesh.frontend.dialects.parsing.call_readers import call_reader
from kvmesh.frontend.dialects.parsing.emitter import Delta, Emitter
from kvmesh.frontend.dialects.parsing.source import (
    MalformedOutput,
    OutputSource,
    Steps,
    Stops,
    Unfinished,
    stops,
)

_SPACES = re.compile(r"[ \t\r\n]+")
_NO_CALLS = Calls(forms=())
_NO_REASONING = Reasoning(begin=(), end=())


class GrammarParser:
    """Splits an output into thinking, text and tool calls as it arrives.

    Held back is only what may yet turn out to be a marker. What is not a call, or not a complete
    one, comes out as text; with `eager` the arguments of a call are passed on as they come, and
    one that breaks off midway stays without `ToolCallEnd`.
    """

    def __init__(
        self,
        calls: Calls | None,
        reasoning: Reasoning | None,
        tools: list[Tool],
        new_id: Callable[[], str],
        eager: bool,
        thinking: bool,
    ) -> None:
        self._calls = calls or _NO_CALLS
        self._reasoning = reasoning or _NO_REASONING
        self._source = OutputSource()
        self._emitter = Emitter(self._source, tools, eager, new_id)
        ends = self._calls.end
        self._readers = [
            (call_reader(form, self._source, self._emitter, ends), "" in opening(form))
            for form in self._calls.forms
        ]
        self._openers = stops(self._calls.openers)
        self._starts = stops((*self._calls.openers, *self._reasoning.begin))
        leaving = self._calls.openers if self._reasoning.calls_end_it else ()
        self._thought_ends = stops((*self._reasoning.end, *leaving))
        self._reading: tuple[Stops, Delta] | None = None
        self._steps = self._run(thinking)

    def feed(self, text: str) -> list[AnswerEvent]:
        reading = self._reading
        if reading is not None and self._source.is_read and reading[0].none_begins_in(text):
            # most of an output, and nothing for the grammar to decide
            return self._emitter.pass_on(text, reading[1])
        self._source.feed(text)
        next(self._steps, None)
        return self._emitter.take()

    def finish(self) -> list[AnswerEvent]:
        self._source.closed = True
        next(self._steps, None)
        return self._emitter.take()

    def _run(self, thinking: bool) -> Steps[None]:
        emitter = self._emitter
        try:
            if thinking:
                yield from self._source.skip_space()
                yield from self._source.literal(*self._reasoning.begin)
                yield from self._think()
            while True:
                marker = yield from self._text()
                if marker in self._reasoning.begin:
                    yield from self._think()
                else:
                    yield from self._attempt(marker)
        except Unfinished:
            pass
        if emitter.attempting:
            self._source.rewind()
            emitter.say(self._source.text)
        emitter.finish()

    def _text(self) -> Steps[str]:
        """Passes on text; returns the marker behind it, "" before a call that needs none."""
        source, emitter = self._source, self._emitter
        while True:
            if not emitter.spoken:
                char = yield from source.peek()
                while spaces := _SPACES.match(source.text, source.pos):
                    source.pos = spaces.end()
                    emitter.say(spaces[0])
                    char = yield from source.peek()
                if char and char in self._calls.bare:
                    return ""
            ends = self._openers if emitter.spoken else self._starts
            self._reading = (ends, TextDelta) if emitter.spoken else None
            text, stop = yield from source.until(ends)
            self._reading = None
            emitter.say(text)
            if stop in self._reasoning.begin and emitter.spoken:
                emitter.say(stop or "")
            elif stop is not None:
                return stop

    def _think(self) -> Steps[None]:
        source, emitter = self._source, self._emitter
        emitter.turn()
        stop = None
        while stop is None:
            self._reading = (self._thought_ends, ThinkingDelta) if emitter.spoken else None
            text, stop = yield from source.until(self._thought_ends)
            self._reading = None
            emitter.say(text, ThinkingDelta)
        if stop not in self._reasoning.end:
            source.pos -= len(stop)
        emitter.turn()

    def _attempt(self, marker: str) -> Steps[None]:
        emitter = self._emitter
        if marker and marker not in self._calls.begin:
            # A call with a marker of its own, outside of any section.
            self._source.pos -= len(marker)
            emitter.attempt(0)
        else:
            emitter.attempt(len(marker))
        try:
            yield from self._section()
        except Unfinished:
            raise
        except MalformedOutput:
            emitter.fail()

    def _section(self) -> Steps[None]:
        """Calls, one behind the other, and the end of the section, which models may omit."""
        source, emitter, calls = self._source, self._emitter, self._calls
        more = yield from self._one_call()
        if more is None:
            raise MalformedOutput
        while more:
            emitter.attempt(0)
            yield from source.skip_space()
            if calls.end and (yield from source.literal(*calls.end)):
                emitter.drop_attempt()
                return
            yield from source.literal(*calls.separators)
            yield from source.skip_space()
            more = yield from self._one_call()
            if more is None:
                source.rewind()
                emitter.drop_attempt()
                return
        yield from source.skip_space()
        yield from source.literal(*calls.end)

    def _one_call(self) -> Steps[bool | None]:
        """Whether more may follow in this section; None if there was no call."""
        yield from self._source.skip_space()
        for reader, alone in self._readers:
            if (yield from reader.call()):
                return not alone
        return None
