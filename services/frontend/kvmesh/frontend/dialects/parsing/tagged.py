"""Reader of tool calls with one tag per argument, typed by the tool's schema."""

import re

from kvmesh.frontend.dialects.grammar import Tagged
from kvmesh.frontend.dialects.parsing.call_sink import MAX_NAME, CallSink, opened, read_name, skip
from kvmesh.frontend.dialects.parsing.coerce import coerce, property_kinds
from kvmesh.frontend.dialects.parsing.literals import JSON, Sink, Transcoder, quoted
from kvmesh.frontend.dialects.parsing.source import (
    MalformedOutput,
    MarkerSet,
    OutputSource,
    Steps,
    Unfinished,
)

_KEY = re.compile(
    r"""(?:["'](?P<quoted>[^"']+)["']|(?P<plain>[^\s"'=]+))"""
    r"""(?:\s+string\s*=\s*["'](?P<string>true|false)["'])?"""
    r"""(?:\s+type\s*=\s*["'](?P<type>\w+)["'])?"""
)
_ATTRIBUTES = re.compile(r"""(?:\s+\w+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*""")


class TaggedReader:
    """Reads arguments as text between tags and types them by the schema."""

    def __init__(
        self, form: Tagged, source: OutputSource, sink: CallSink, ends: tuple[str, ...]
    ) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._after_call = (*form.close, *form.after, *ends)
        self._after_value = (form.key, *self._after_call)
        self._value_end = MarkerSet([form.value_end])
        self._open_end = MarkerSet(form.open_end)
        self._key_end = MarkerSet([form.key_end])
        self._kind_end = MarkerSet(form.kind[1:] if form.kind else ())
        self._wrap_end = MarkerSet([form.wrap[1] + form.value_end] if form.wrap else ())

    def call(self) -> Steps[bool]:
        form, source, sink = self._form, self._source, self._sink
        yield from skip(source, form.before)
        if not (yield from opened(source, form.open)):
            return False
        if form.named:
            yield from self._named()
        yield from skip(source, form.whole)
        if (yield from source.skip_space()) == "{":
            yield from Transcoder(source, sink.arguments, JSON, self._after_call).object()
            yield from skip(source, form.whole)
            yield from self._end()
            return True
        separator = "{"
        while (yield from self._key_here()):
            key, is_string = yield from self._key()
            sink.arguments(f'{separator}"{quoted(key)}": ')
            separator = ", "
            yield from self._value(key, is_string)
        if not (yield from source.follows(self._after_call)):
            raise MalformedOutput
        sink.arguments("{}" if separator == "{" else "}")
        yield from self._end()
        return True

    def _end(self) -> Steps[None]:
        self._sink.end()
        yield from self._source.literal(*self._form.close)
        yield from skip(self._source, self._form.after)

    def _named(self) -> Steps[None]:
        form, source = self._form, self._source
        yield from source.skip_space()
        quote = yield from source.literal('"', "'")
        self._sink.name((yield from read_name(source)))
        if quote:
            yield from source.literal(quote)
        if "" not in form.open_end:
            attributes = yield from self._until(self._open_end)
            if not _ATTRIBUTES.fullmatch(attributes):
                raise MalformedOutput
        else:
            yield from source.literal(*form.open_end)

    def _key_here(self) -> Steps[bool]:
        yield from self._source.skip_space()
        return (yield from self._source.literal(self._form.key)) is not None

    def _key(self) -> Steps[tuple[str, bool | None]]:
        """The argument's name, and whether it is a string; None if the tag does not state it."""
        found = _KEY.fullmatch((yield from self._until(self._key_end)).strip())
        if not found:
            raise MalformedOutput
        kind = found["type"]
        if self._form.kind:
            yield from self._source.skip_space()
            if (yield from self._source.literal(self._form.kind[0])):
                kind = (yield from self._until(self._kind_end)).strip()
        if self._form.value:
            yield from self._source.skip_space()
            if not (yield from self._source.literal(self._form.value)):
                raise MalformedOutput
        is_string = None if found["string"] is None else found["string"] == "true"
        if kind:
            is_string = kind == "string"
        return found["quoted"] or found["plain"], is_string

    def _until(self, ends: MarkerSet) -> Steps[str]:
        """Read the short text before one of `ends`, and the end."""
        text, stop = "", None
        while stop is None:
            part, stop = yield from self._source.until(ends)
            text += part
            if len(text) > MAX_NAME:
                raise MalformedOutput
        return text

    def _value(self, key: str, is_string: bool | None) -> Steps[None]:
        kinds = property_kinds(self._sink.schema(), key)
        if is_string is not None:
            kinds = frozenset(["string"]) if is_string else kinds - {"string"}
        wrap = self._form.wrap
        wrapped = wrap is not None and (yield from self._source.literal(wrap[0])) is not None
        read = self._wrapped if wrapped else self._text
        if kinds == {"string"}:
            self._sink.arguments('"')
            yield from read(lambda text: self._sink.arguments(quoted(text)))
            self._sink.arguments('"')
        else:
            parts: list[str] = []
            yield from read(parts.append)
            self._sink.arguments(coerce("".join(parts), kinds))

    def _wrapped(self, sink: Sink) -> Steps[None]:
        """Read a value up to the marks that end it."""
        stop = None
        while stop is None:
            text, stop = yield from self._source.until(self._wrap_end)
            if stop is None and self._source.closed:
                raise Unfinished
            sink(text)

    def _text(self, sink: Sink) -> Steps[None]:
        """Read the value without its padding, up to an end tag that really closes it."""
        padding, source = self._form.padding, self._source
        if padding:
            yield from source.literal(padding)
        held = ""
        while True:
            text, stop = yield from source.until(self._value_end)
            if stop is None and source.closed:
                raise Unfinished
            text = held + text
            if stop and (yield from source.follows(self._after_value)):
                sink(text.removesuffix(padding))
                return
            text += stop or ""
            held = padding if padding and text.endswith(padding) else ""
            sink(text.removesuffix(held))
