"""Reader of tool calls with one tag per argument, typed by the tool's schema."""

import re

from kvmesh.frontend.dialects.grammar import Tagged
from kvmesh.frontend.dialects.parsing.call_sink import MAX_NAME, CallSink, opened, read_name, skip
from kvmesh.frontend.dialects.parsing.coerce import coerce, property_kinds
from kvmesh.frontend.dialects.parsing.literals import Sink, quoted
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
)


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
        self._key_end = MarkerSet([form.key_end])

    def call(self) -> Steps[bool]:
        form, source, sink = self._form, self._source, self._sink
        yield from skip(source, form.before)
        if not (yield from opened(source, form.open)):
            return False
        yield from self._named()
        separator = "{"
        while (yield from self._key_here()):
            key, is_string = yield from self._key()
            sink.arguments(f'{separator}"{quoted(key)}": ')
            separator = ", "
            yield from self._value(key, is_string)
        if not (yield from source.follows(self._after_call)):
            raise MalformedOutput
        sink.arguments("{}" if separator == "{" else "}")
        sink.end()
        yield from source.literal(*form.close)
        yield from skip(source, form.after)
        return True

    def _named(self) -> Steps[None]:
        form, source = self._form, self._source
        yield from source.skip_space()
        quote = yield from source.literal('"', "'")
        self._sink.name((yield from read_name(source)))
        if quote:
            yield from source.literal(quote)
        if "" not in form.open_end:
            yield from source.skip_space()
            if not (yield from source.literal(*form.open_end)):
                raise MalformedOutput

    def _key_here(self) -> Steps[bool]:
        yield from self._source.skip_space()
        return (yield from self._source.literal(self._form.key)) is not None

    def _key(self) -> Steps[tuple[str, bool | None]]:
        """The argument's name, and whether it is a string; None if the tag does not state it."""
        text, stop = "", None
        while stop is None:
            part, stop = yield from self._source.until(self._key_end)
            text += part
            if len(text) > MAX_NAME:
                raise MalformedOutput
        found = _KEY.fullmatch(text.strip())
        if not found:
            raise MalformedOutput
        if self._form.value:
            yield from self._source.skip_space()
            if not (yield from self._source.literal(self._form.value)):
                raise MalformedOutput
        is_string = None if found["string"] is None else found["string"] == "true"
        return found["quoted"] or found["plain"], is_string

    def _value(self, key: str, is_string: bool | None) -> Steps[None]:
        kinds = property_kinds(self._sink.schema(), key)
        if is_string is not None:
            kinds = frozenset(["string"]) if is_string else kinds - {"string"}
        if kinds == {"string"}:
            self._sink.arguments('"')
            yield from self._text(lambda text: self._sink.arguments(quoted(text)))
            self._sink.arguments('"')
        else:
            parts: list[str] = []
            yield from self._text(parts.append)
            self._sink.arguments(coerce("".join(parts), kinds))

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
