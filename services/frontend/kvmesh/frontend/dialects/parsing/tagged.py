"""Reader of tool calls with one tag per argument, typed by the tool's schema."""

import json
import re
from html import unescape
from typing import Any

from kvmesh.frontend.dialects.grammar import Tagged
from kvmesh.frontend.dialects.parsing.call_sink import MAX_NAME, CallSink, opened, read_name, skip
from kvmesh.frontend.dialects.parsing.coerce import coerce, property_kinds
from kvmesh.frontend.dialects.parsing.literals import JSON, Sink, Transcoder, quoted
from kvmesh.frontend.dialects.parsing.source import (
    SPACE,
    MalformedOutput,
    MarkerSet,
    OutputSource,
    Steps,
    Unfinished,
    marker_set,
)

_KEY = re.compile(
    r"""(?:["'](?P<quoted>[^"']+)["']|(?P<plain>[^\s"'=]+))"""
    r"""(?:\s+string\s*=\s*["'](?P<string>true|false)["'])?"""
    r"""(?:\s+type\s*=\s*["'](?P<type>\w+)["'])?"""
)
# names under which models write all arguments as one
_WRAPPERS = ("arguments", "input", "parameters", "properties")
_ATTRIBUTES = re.compile(r"""(?:\s+\w+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*""")


class TaggedReader:
    """Reads arguments as text between tags and types them by the schema.

    A missing closing tag ends a value at the tag of the next argument, if that names an argument
    which the call still lacks, or at a tag that ends the call, if nothing but another call or the
    end of the output follows. Both must stand as the value's own tag does: at the start of a line,
    or anywhere if that one does not begin a line. Other such tags are text of the value, and so are
    those of a call that it contains whole.
    """

    def __init__(
        self,
        form: Tagged,
        source: OutputSource,
        sink: CallSink,
        ends: tuple[str, ...],
        begins: tuple[str, ...],
    ) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._next_calls = next_calls = tuple(
            m for m in (*form.open, *form.before[:1], *begins) if m
        )
        self._closers = {
            **dict.fromkeys(ends, next_calls),
            **dict.fromkeys(form.after, (*ends, *next_calls)),
            **dict.fromkeys(form.close, (*form.after, *ends, *next_calls)),
        }
        self._after_call = (*self._closers, *next_calls)
        self._after_value = (form.key, *self._after_call)
        self._value_stops = marker_set((form.value_end, form.key, *self._closers, *next_calls))
        self._open_stops = marker_set(form.open_end)
        self._key_stops = marker_set((form.key_end, form.value or ""))
        self._kind_ends = form.kind[1:] if form.kind else ()
        self._kind_stops = marker_set(self._kind_ends)
        self._wrap_stops = marker_set(form.wrap[1:] if form.wrap else ())
        self._given: set[str] = set()
        self._own_line = False

    def call(self) -> Steps[bool]:
        form, source, sink = self._form, self._source, self._sink
        yield from skip(source, form.before)
        if not (yield from opened(source, form.open)):
            return False
        name = (yield from self._named()) if form.named else ""
        yield from skip(source, form.whole)
        if (yield from self._space()) == "{":
            yield from Transcoder(source, sink.arguments, JSON, self._after_call).object()
            yield from skip(source, form.whole)
            yield from self._end()
            return True
        self._given.clear()
        separator = "{"
        while True:
            sink.hold()
            if (yield from source.literal(form.key)) is None:
                break
            key, is_string = yield from self._key()
            sink.let_go()
            if key in _WRAPPERS and key not in self._properties() != {}:
                members = yield from self._wrapper(key)
                sink.arguments(separator + members if members else "")
                separator = ", " if members else separator
            else:
                sink.arguments(f'{separator}"{quoted(key)}": ')
                separator = ", "
                yield from self._value(key, is_string)
            yield from self._space()
        if not (yield from source.follows(self._after_call)):
            raise MalformedOutput
        lone = separator == "{" and bool(name) and bool(self._next_calls)
        if lone and not sink.known(name) and (yield from source.follows(self._next_calls)):
            raise MalformedOutput  # a word behind a mention of the tag, before a call
        sink.arguments("{}" if separator == "{" else "}")
        yield from self._end()
        return True

    def _end(self) -> Steps[None]:
        self._sink.end()
        yield from self._source.skip_space()
        yield from self._source.literal(*self._form.close)
        yield from skip(self._source, self._form.after)

    def _named(self) -> Steps[str]:
        form, source = self._form, self._source
        yield from source.skip_space()
        quote = yield from source.literal('"', "'")
        if quote:
            name = self._unescaped((yield from self._until(marker_set((quote,))))[0])
        else:
            name = yield from read_name(source)
        self._sink.name(name)
        if "" not in form.open_end:
            attributes, _ = yield from self._until(self._open_stops)
            if not _ATTRIBUTES.fullmatch(attributes):
                raise MalformedOutput
        else:
            yield from source.literal(*form.open_end)
        return name

    def _space(self) -> Steps[str]:
        """Skip white space before a tag; return what follows, "" at the end."""
        self._own_line = False
        while (char := (yield from self._source.peek())) and char in SPACE:
            self._own_line = self._own_line or char == "\n"
            self._source.pos += 1
        return char

    def _key(self) -> Steps[tuple[str, bool | None]]:
        """The argument's name, and whether it is a string; None if the tag does not state it."""
        form, source = self._form, self._source
        text, stop = yield from self._until(self._key_stops)
        found = _KEY.fullmatch(text.strip())
        if not found:
            raise MalformedOutput
        kind = found["type"]
        if form.kind:
            yield from source.skip_space()
            if (yield from source.literal(form.kind[0])):
                kind = (yield from self._until(self._kind_stops))[0].strip()
        if form.value and stop != form.value:
            yield from skip(source, (form.key_end, *self._kind_ends))
            if not (yield from source.literal(form.value)):
                raise MalformedOutput
        key = self._unescaped(found["quoted"] or found["plain"])
        self._given.add(key)
        if kind:
            return key, kind == "string"
        return key, None if found["string"] is None else found["string"] == "true"

    def _until(self, ends: MarkerSet) -> Steps[tuple[str, str]]:
        """Read the short text before one of `ends`, and the end."""
        text, stop = "", None
        while stop is None:
            part, stop = yield from self._source.until(ends)
            text += part
            if len(text) > MAX_NAME:
                raise MalformedOutput
        return text, stop

    def _unescaped(self, name: str) -> str:
        return unescape(name) if self._form.escaped else name

    def _properties(self) -> dict[str, Any]:
        found = self._sink.schema().get("properties")
        return found if isinstance(found, dict) else {}

    def _value(self, key: str, is_string: bool | None) -> Steps[None]:
        kinds = property_kinds(self._sink.schema(), key)
        if is_string is not None:
            # the schema comes first
            stated = frozenset(["string"])
            kinds = (kinds & stated if is_string else kinds - stated) or kinds
            kinds = kinds or (stated if is_string else kinds)
        if kinds == {"string"}:
            self._sink.arguments('"')
            yield from self._read(lambda text: self._sink.arguments(quoted(text)))
            self._sink.arguments('"')
        else:
            parts: list[str] = []
            yield from self._read(parts.append)
            self._sink.arguments(coerce("".join(parts), kinds))

    def _wrapper(self, key: str) -> Steps[str]:
        """Read an argument that the tool lacks: its members, if they are the tool's arguments."""
        parts: list[str] = []
        yield from self._read(parts.append)
        text = "".join(parts)
        value = coerce(text, frozenset(["object"]))
        members = json.loads(value)
        if isinstance(members, dict) and members.keys() <= self._properties().keys():
            self._given.update(members)
            return value[1:-1]
        return f'"{key}": {coerce(text, frozenset())}'

    def _read(self, sink: Sink) -> Steps[None]:
        """Read a value up to its end."""
        wrap = self._form.wrap
        if wrap is not None and (yield from self._source.follow(wrap[0])):
            yield from self._wrapped(sink)
        else:
            yield from self._text(sink)

    def _wrapped(self, sink: Sink) -> Steps[None]:
        """Read a value up to the marks that end it."""
        source, value_end = self._source, (self._form.value_end,)
        while True:
            text, stop = yield from source.until(self._wrap_stops)
            if stop is None and source.closed:
                raise Unfinished
            sink(text)
            if stop is not None:
                if (yield from source.follows(value_end)):
                    break
                sink(stop)
        yield from skip(source, value_end)

    def _text(self, sink: Sink) -> Steps[None]:
        """Read the value without its padding, up to the tag that really ends it."""
        source, form, padding = self._source, self._form, self._form.padding
        breaks = (padding, "\r" + padding) if padding else ()
        line_break = yield from source.literal(*breaks)
        line_start = line_break is not None
        padding = line_break or padding  # the value's own kind of line break on both sides
        held = ""  # a line break that may belong to the tag behind it
        keys = calls = 0  # tags of arguments and calls that the value has opened
        while True:
            text, stop = yield from source.until(self._value_stops)
            if stop is None and source.closed:
                raise Unfinished
            if text:
                text = held + text
                held = _break_at_end(text, padding or "\n")
                line_start = text.endswith("\n")
                sink(text.removesuffix(held))
            if stop is None:
                continue
            source.pos -= len(stop)
            if stop == form.value_end:
                if end := (yield from self._closes(keys, calls)):
                    sink(held.removesuffix(padding))
                    source.pos += end
                    return
                keys -= keys > 0
            elif stop in self._next_calls:
                calls += 1
            elif calls:
                calls -= stop != form.key
                keys += stop == form.key
            elif (line_start or not self._own_line) and (yield from self._ends_value(stop)):
                return
            else:
                keys += stop == form.key
            source.pos += len(stop)
            sink(held + stop)
            held, line_start = "", False

    def _closes(self, keys: int, calls: int) -> Steps[int]:
        """The length of the closing tag here, with its repetitions; 0 if it is a part of the value.

        `keys`, `calls`: tags of arguments and calls that the value has opened.
        """
        value_end, end = self._form.value_end, len(self._form.value_end)
        tag, beyond = yield from self._tag(end)
        while tag == value_end and not keys:
            end = beyond
            tag, beyond = yield from self._tag(end)
        if tag == self._form.key and keys:
            return end if (yield from self._lacks_argument(beyond)) else 0
        if keys and calls:
            # a whole call within the value, unless nothing follows it
            try:
                while tag in self._closers:
                    tag, beyond = yield from self._tag(beyond)
            except Unfinished:
                return end
            return 0
        return end if tag in self._after_value else 0

    def _tag(self, offset: int) -> Steps[tuple[str, int]]:
        """The tag `offset` characters from here, "" if it is none, and the offset behind it.

        Raises Unfinished at the end of the output.
        """
        tags = self._value_stops
        while True:
            rest = self._source.text[self._source.pos + offset :]
            start = len(rest) - len(rest.lstrip(SPACE))
            found = tags.find(rest[: start + tags.longest], start)
            if found and found.start() == start:
                return found[0], offset + found.end()
            if tags.partial_start(rest, start) != start:
                return "", offset
            if self._source.closed:
                raise Unfinished
            yield

    def _ends_value(self, stop: str) -> Steps[bool]:
        """True if the tag here, `stop`, ends a value whose closing tag is missing."""
        if stop == self._form.key:
            return (yield from self._lacks_argument(len(stop)))
        following = self._closers[stop]
        try:
            return bool(following) and (yield from self._source.follows(following, len(stop)))
        except Unfinished:
            return True

    def _lacks_argument(self, offset: int) -> Steps[bool]:
        """True if a whole tag is here that names an argument which the call lacks.

        `offset`: the tag's characters before the name.
        """
        form, source = self._form, self._source
        while True:
            rest = source.text[source.pos + offset : source.pos + offset + MAX_NAME]
            end = self._key_stops.find(rest, 0)
            if end or "\n" in rest.strip() or len(rest) == MAX_NAME or source.closed:
                break
            yield
        found = _KEY.fullmatch(rest[: end.start()].strip()) if end else None
        if not end or not found:
            return False
        if form.value and end[0] != form.value:
            whole = yield from source.follows((form.value,), offset + end.end())
            if not whole:
                return False
        key = found["quoted"] or found["plain"]
        properties = self._sink.schema().get("properties")
        known = key in properties if isinstance(properties, dict) and properties else True
        return known and key not in self._given


def _break_at_end(text: str, line_break: str) -> str:
    """The end of `text` that is the line break, or the beginning of one."""
    ends = (line_break, line_break[:-1])
    return next((end for end in ends if text.endswith(end)), "")
