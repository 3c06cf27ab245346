"""Streaming parsers: what all share, and the one of every family whose grammar is data."""

import re
from collections.abc import Callable
from functools import cache, cached_property
from typing import NamedTuple

from kvmesh.frontend.conversation import AnswerEvent, TextDelta, ThinkingDelta, Tool
from kvmesh.frontend.dialects.grammar import (
    ReasoningGrammar,
    ToolCallGrammar,
    closing,
    opening,
)
from kvmesh.frontend.dialects.parsing.call_readers import call_reader
from kvmesh.frontend.dialects.parsing.call_sink import CallReader, skip
from kvmesh.frontend.dialects.parsing.emitter import Delta, Emitter
from kvmesh.frontend.dialects.parsing.source import (
    MalformedOutput,
    MarkerSet,
    OutputSource,
    Steps,
    Unfinished,
    marker_set,
)

_SPACES = re.compile(r"[ \t\r\n]+")
_NO_CALLS = ToolCallGrammar(forms=())
_NO_REASONING = ReasoningGrammar(begin=(), end=())


class StreamParser:
    """Feeds an output to `_read`, a generator, and returns the events that it has emitted."""

    def __init__(self, tools: list[Tool], new_id: Callable[[], str], eager: bool) -> None:
        self._source = OutputSource()
        self._emitter = Emitter(self._source, tools, eager, new_id)
        self._open_delta: tuple[MarkerSet, Delta] | None = None
        self._steps = self._run()

    def feed(self, text: str) -> list[AnswerEvent]:
        open_delta = self._open_delta
        if open_delta is not None and self._source.exhausted and open_delta[0].none_begins_in(text):
            # fast path for most of an output: no marker can begin in this text
            return self._emitter.continue_delta(text, open_delta[1])
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

    def _read(self) -> Steps[None]:
        """Read the whole output. Raises Unfinished at its end."""
        raise NotImplementedError

    def _run(self) -> Steps[None]:
        emitter = self._emitter
        try:
            yield from self._read()
        except Unfinished:
            if emitter.attempting:
                self._source.rewind()
                emitter.write(self._source.text)
        emitter.finish()

    def _copy(self, stops: MarkerSet, kind: Delta) -> Steps[str | None]:
        """Emit the text before one of `stops`; the stop, None if more text may come before it."""
        emitter = self._emitter
        self._open_delta = (stops, kind) if emitter.has_text else None
        text, stop = yield from self._source.until(stops)
        self._open_delta = None
        emitter.write(text, kind)
        return stop


class _Marks(NamedTuple):
    """The markers of a grammar by what they may end or begin.

    `starts`: those at the start of a text; `openers_unended`: those behind a call in thinking.
    """

    call_ends: tuple[str, ...]
    all_ends: tuple[str, ...]
    frame_opens: tuple[str, ...]
    frame_closes: tuple[str, ...]
    all_marks: tuple[str, ...]
    openers: MarkerSet
    openers_unended: MarkerSet
    starts: MarkerSet
    thinking_ends: MarkerSet


@cache
def _marks(calls: ToolCallGrammar, reasoning: ReasoningGrammar) -> _Marks:
    call_ends = tuple(mark for form in calls.forms for mark in closing(form) if mark[0] != "`")
    frames = (calls.frame, reasoning.frame)
    # an answer may begin with the end of thinking that nothing has begun
    frame_opens = (*(marker for frame in frames for marker in frame.open), *reasoning.end)
    frame_closes = tuple(marker for frame in frames for marker in frame.close)
    openers = (*calls.openers, *frame_closes)
    all_marks = (*openers, *frame_opens, *reasoning.begin)
    call_starts = calls.openers if reasoning.calls_end_it else ()
    return _Marks(
        call_ends=call_ends,
        all_ends=(*call_ends, *(end for end in calls.end if end[0] != "`")),
        frame_opens=frame_opens,
        frame_closes=frame_closes,
        all_marks=all_marks,
        openers=marker_set(openers),
        openers_unended=marker_set((*openers, *reasoning.end)),
        starts=marker_set(all_marks),
        thinking_ends=marker_set((*reasoning.end, *call_starts)),
    )


class GrammarParser(StreamParser):
    """Splits an output into thinking, text and tool calls as it arrives.

    It holds back only text that may become a marker. Text that resembles a call, or an incomplete
    call, is emitted as text. With `eager` it emits arguments as they arrive, and a call that
    breaks off midway has no `ToolCallEnd`.
    """

    def __init__(
        self,
        calls: ToolCallGrammar | None,
        reasoning: ReasoningGrammar | None,
        tools: list[Tool],
        new_id: Callable[[], str],
        eager: bool,
        thinking: bool,
    ) -> None:
        super().__init__(tools, new_id, eager)
        self._calls = calls or _NO_CALLS
        self._reasoning = reasoning or _NO_REASONING
        self._begins_thinking = thinking
        self._marks = _marks(self._calls, self._reasoning)
        self._unended = False  # thinking that a call has ended may go on behind it

    @cached_property
    def _readers(self) -> list[tuple[CallReader, bool]]:
        """The reader of each form of calls, and whether that needs no marker."""
        begins, ends = self._calls.begin, self._calls.end
        return [
            (call_reader(form, self._source, self._emitter, ends, begins), "" in opening(form))
            for form in self._calls.forms
        ]

    def _read(self) -> Steps[None]:
        if self._begins_thinking:
            yield from self._source.skip_space()
            yield from self._source.literal(*self._reasoning.begin)
            yield from self._thinking()
        while True:
            marker = yield from self._text()
            if marker in self._reasoning.begin:
                yield from self._thinking()
            else:
                yield from self._attempt(marker)

    def _text(self) -> Steps[str]:
        """Emit text; return the marker after it, "" before a call that begins without one."""
        source, emitter, marks = self._source, self._emitter, self._marks
        while True:
            if not emitter.has_text:
                char = yield from source.peek()
                while spaces := _SPACES.match(source.text, source.pos):
                    source.pos = spaces.end()
                    emitter.write(spaces[0])
                    char = yield from source.peek()
                if char and char in self._calls.bare:
                    return ""
            ends = marks.openers_unended if self._unended else marks.openers
            ends = ends if emitter.has_text else marks.starts
            stop = yield from self._copy(ends, TextDelta)
            if stop in self._reasoning.begin and emitter.has_text:
                emitter.write(stop or "")
            elif stop is not None and (yield from self._framing(stop)):
                self._unended = self._unended and stop not in self._reasoning.end
                emitter.boundary()
            elif stop in self._marks.frame_opens or stop in self._marks.frame_closes:
                emitter.write(stop)
            elif stop is not None:
                return stop

    def _framing(self, marker: str) -> Steps[bool]:
        """True if the marker surrounds visible text and is not a part of it."""
        if not self._emitter.has_text:
            return marker in self._marks.frame_opens or marker in self._marks.frame_closes
        if self._unended and marker in self._reasoning.end:
            return True
        if marker not in self._marks.frame_closes:
            return False
        return (yield from self._source.ends_or_follows(self._marks.all_marks))

    def _thinking(self) -> Steps[None]:
        """Emit thinking up to its end, or up to a call that ends it."""
        self._emitter.boundary()
        while True:
            stop = yield from self._copy(self._marks.thinking_ends, ThinkingDelta)
            if stop is None:
                continue
            self._unended = stop not in self._reasoning.end
            if not self._unended:
                break
            if not self._calls.forms:  # calls are text
                self._source.pos -= len(stop)
                break
            if (yield from self._attempt(stop, ThinkingDelta)):
                return
        self._emitter.boundary()

    def _attempt(self, marker: str, kind: Delta = TextDelta) -> Steps[bool]:
        """Read calls from a marker on; False if there are none, with the marker emitted."""
        emitter = self._emitter
        if marker and marker not in self._calls.begin:
            # the marker of a single call, outside any section
            self._source.pos -= len(marker)
            emitter.begin_attempt(0)
        else:
            emitter.begin_attempt(len(marker))
        try:
            yield from self._section()
        except Unfinished:
            raise
        except MalformedOutput:
            return not emitter.fail_attempt(kind)
        return True

    def _section(self) -> Steps[None]:
        """Read consecutive calls and the end of their section, which models may omit or repeat."""
        source, emitter, calls = self._source, self._emitter, self._calls
        yield from skip(source, calls.begin)
        more = yield from self._one_call()
        if more is None:
            raise MalformedOutput
        while more:
            yield from self._surplus(self._marks.call_ends)
            emitter.begin_attempt(0)
            yield from source.skip_space()
            if (calls.end and (yield from source.literal(*calls.end))) or self._breaks_off():
                emitter.end_attempt()
                break
            yield from source.literal(*calls.separators)
            yield from skip(source, calls.begin)
            more = yield from self._one_call()
            if more is None:
                source.rewind()
                emitter.end_attempt()
                return
        yield from self._surplus(self._marks.all_ends)

    def _surplus(self, ends: tuple[str, ...]) -> Steps[None]:
        """Skip what models write too much behind a call: a bracket, and the same ends again."""
        source = self._source
        char = yield from source.skip_space()
        if char and char in "}]" and (yield from source.ends_or_follows(self._marks.all_ends, 1)):
            source.pos += 1
        yield from skip(source, ends)
        self._breaks_off()

    def _breaks_off(self) -> bool:
        """True if the output ends here or within an end of calls, which is dropped."""
        source = self._source
        rest = source.text[source.pos :]
        if not source.closed or not any(end.startswith(rest) for end in self._marks.all_ends):
            return False
        source.pos += len(rest)
        return True

    def _one_call(self) -> Steps[bool | None]:
        """Read a call: True if more may follow in this section, None if there is no call."""
        yield from self._source.skip_space()
        for reader, alone in self._readers:
            if (yield from reader.call()):
                return not alone
        return None
