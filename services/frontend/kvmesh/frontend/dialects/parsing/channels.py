"""Streaming parser of families whose output is a sequence of messages on channels."""

import re
from collections.abc import Callable

from kvmesh.frontend.conversation import TextDelta, ThinkingDelta, Tool
from kvmesh.frontend.dialects.grammar import ChannelGrammar
from kvmesh.frontend.dialects.parsing.call_readers import call_reader
from kvmesh.frontend.dialects.parsing.emitter import Delta
from kvmesh.frontend.dialects.parsing.parser import StreamParser
from kvmesh.frontend.dialects.parsing.source import (
    MalformedOutput,
    Steps,
    Unfinished,
    marker_set,
)

MAX_HEADER = 256
_WORD = re.compile(r"[^\s<]*")


class ChannelParser(StreamParser):
    """Maps each message to thinking, text or calls by its header.

    Output that has no header is text, and so is the content of a call's message that is no call.
    """

    def __init__(
        self,
        grammar: ChannelGrammar,
        tools: list[Tool],
        new_id: Callable[[], str],
        eager: bool,
        calls: bool,
    ) -> None:
        super().__init__(tools, new_id, eager)
        self._grammar = grammar
        self._reads_calls = calls
        stops = (*grammar.end, *grammar.start)
        self._readers = [
            call_reader(form, self._source, self._emitter, stops, ()) for form in grammar.forms
        ]
        self._stops = marker_set(stops)
        self._thought_stops = marker_set((*stops, grammar.recipient))
        self._header_stops = marker_set((*grammar.mark, *stops))

    def _read(self) -> Steps[None]:
        stop = ""
        while True:
            while (yield from self._message(stop)):
                stop = ""
            stop = yield from self._body(TextDelta)
            if stop in self._grammar.end:
                # another header may follow without a start
                self._emitter.boundary()
                stop = ""

    def _body(self, kind: Delta) -> Steps[str]:
        """Emit text or thinking; return the marker that ends it, or a recipient, left unread."""
        stops = self._thought_stops if kind is ThinkingDelta else self._stops
        while True:
            stop = yield from self._copy(stops, kind)
            if stop is not None and stop == self._grammar.recipient:
                self._source.pos -= len(stop)
                if (yield from self._names_channel(len(stop))):
                    return stop
                self._source.pos += len(stop)
                self._emitter.write(stop, kind)
            elif stop is not None:
                return stop

    def _names_channel(self, offset: int) -> Steps[bool]:
        """True if a word is `offset` characters from here, and the mark of a header behind it."""
        source, marks = self._source, self._grammar.mark
        while True:
            rest = source.text[source.pos + offset : source.pos + offset + MAX_HEADER]
            tail = _WORD.sub("", rest, count=1)
            if tail.startswith(marks):
                return True
            begins = any(mark.startswith(tail) for mark in marks)
            if source.closed or len(rest) == MAX_HEADER or not begins:
                return False
            yield

    def _message(self, start: str) -> Steps[bool]:
        """Read a message behind its start, or only the header of one whose body is text.

        True if another header follows it directly.
        """
        grammar, source, emitter = self._grammar, self._source, self._emitter
        emitter.begin_attempt(len(start))
        header = yield from self._header()
        call = re.fullmatch(grammar.calls, header) if self._reads_calls else None
        name = call.groupdict().get("name") if call else None
        if re.fullmatch(grammar.thinking, header):
            self._begin_body()
            stop = yield from self._body(ThinkingDelta)
            emitter.boundary()
            if stop in grammar.start:
                source.pos -= len(stop)
            return stop == grammar.recipient or stop in grammar.end
        if re.fullmatch(grammar.text, header):
            self._begin_body()
        elif call and (not grammar.known or emitter.known(name or "")):
            self._begin_body()
            yield from self._calls(name)
        elif start:
            emitter.fail_attempt()
        else:
            source.rewind()
            emitter.end_attempt()
        return False

    def _begin_body(self) -> None:
        self._emitter.end_attempt()
        self._emitter.boundary()

    def _header(self) -> Steps[str]:
        """Read a header and its mark; "" if there is none."""
        header = ""
        while True:
            text, stop = yield from self._source.until(self._header_stops)
            header += text
            if len(header) > MAX_HEADER or not re.fullmatch(self._grammar.header, header):
                return ""
            if stop is not None:
                return header.lstrip() + stop if stop in self._grammar.mark else ""

    def _calls(self, name: str | None) -> Steps[None]:
        """Read the calls of a message, or the only one if its header has the `name`."""
        emitter = self._emitter
        try:
            if not (yield from self._one_call(name)):
                raise MalformedOutput
            while name is None and (yield from self._one_call(None)):
                pass
            if emitter.attempting:
                self._source.rewind()
                emitter.end_attempt()
        except Unfinished:
            raise
        except MalformedOutput:
            emitter.fail_attempt()

    def _one_call(self, name: str | None) -> Steps[bool]:
        emitter = self._emitter
        emitter.begin_attempt(0)
        if name is not None:
            emitter.name(name)
        yield from self._source.skip_space()
        for reader in self._readers:
            if (yield from reader.call()):
                return True
        return False
