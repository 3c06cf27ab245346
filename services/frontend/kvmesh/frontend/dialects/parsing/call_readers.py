"""Factory of the reader for a form of tool calls."""

import re

from kvmesh.frontend.dialects import grammar
from kvmesh.frontend.dialects.grammar import KeyedLiterals
from kvmesh.frontend.dialects.parsing.call_sink import CallReader, CallSink, opened, read_name
from kvmesh.frontend.dialects.parsing.elements import ElementsReader
from kvmesh.frontend.dialects.parsing.json_calls import (
    ArgumentsReader,
    JsonReader,
    NamedReader,
    NameKeysReader,
)
from kvmesh.frontend.dialects.parsing.literals import PYTHON, Style, Transcoder, quoted
from kvmesh.frontend.dialects.parsing.source import MalformedOutput, OutputSource, Steps
from kvmesh.frontend.dialects.parsing.tagged import TaggedReader

_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false"}


class PythonReader:
    """Reads Python calls, with or without a list around them."""

    def __init__(self, source: OutputSource, sink: CallSink, ends: tuple[str, ...]) -> None:
        self._source = source
        self._sink = sink
        self._coder = Transcoder(source, sink.arguments, PYTHON, ends)

    def call(self) -> Steps[bool]:
        source, sink = self._source, self._sink
        yield from source.skip_space()
        if (yield from source.literal("[")):
            self._coder.in_list = True
        char = yield from source.skip_space()
        if not (char.isalpha() or char == "_"):
            return False
        name = yield from read_name(source, _IDENTIFIER)
        if not (yield from source.literal("(")) or not sink.known(name):
            raise MalformedOutput
        sink.name(name)
        properties = list(sink.schema().get("properties") or ())
        count = 0
        while (yield from source.skip_space()) != ")":
            yield from self._argument("{" if count == 0 else ", ", properties[count : count + 1])
            count += 1
            if (yield from source.skip_space()) != ")" and not (yield from source.literal(",")):
                raise MalformedOutput
        source.pos += 1
        sink.arguments("}" if count else "{}")
        sink.end()
        yield from source.skip_space()
        if (yield from source.literal("]")):
            self._coder.in_list = False
        return True

    def _argument(self, separator: str, positional: list[str]) -> Steps[None]:
        """Read one argument: by keyword, or by position among the schema's properties."""
        word = yield from self._source.match(_IDENTIFIER, 256)
        yield from self._source.skip_space()
        if word and (yield from self._source.literal("=")):
            self._sink.arguments(f'{separator}"{quoted(word)}": ')
            yield from self._coder.value(inside="(")
        elif positional and (not word or word in _CONSTANTS):
            self._sink.arguments(f'{separator}"{quoted(positional[0])}": ')
            if word:
                self._sink.arguments(_CONSTANTS[word])
            else:
                yield from self._coder.value()
        else:
            raise MalformedOutput


class KeyedReader:
    """Reads a name and Python-like arguments with their own quotes."""

    def __init__(self, form: KeyedLiterals, source: OutputSource, sink: CallSink) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._style = Style(quote=form.quote, bare_keys=True)

    def call(self) -> Steps[bool]:
        source, sink = self._source, self._sink
        if not (yield from opened(source, self._form.open)):
            return False
        sink.name((yield from read_name(source)))
        if (yield from source.skip_space()) != "{":
            raise MalformedOutput
        yield from Transcoder(source, sink.arguments, self._style).object()
        sink.end()
        return True


def call_reader(
    form: grammar.CallForm,
    source: OutputSource,
    sink: CallSink,
    ends: tuple[str, ...],
    begins: tuple[str, ...],
) -> CallReader:
    """The reader of `form`; `begins` and `ends` are the markers of a section of calls."""
    match form:
        case grammar.JsonObjects():
            return JsonReader(form, source, sink, ends)
        case grammar.NameKeys():
            return NameKeysReader(source, sink, ends)
        case grammar.Arguments():
            return ArgumentsReader(source, sink, ends)
        case grammar.NamedJson():
            return NamedReader(form, source, sink, ends)
        case grammar.Tagged():
            return TaggedReader(form, source, sink, ends, begins)
        case grammar.Elements():
            return ElementsReader(form, source, sink, ends)
        case grammar.Pythonic():
            return PythonReader(source, sink, ends)
        case grammar.KeyedLiterals():
            return KeyedReader(form, source, sink)
