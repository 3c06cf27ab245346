"""Factory of the reader for a form of tool calls."""

from kvmesh.frontend.dialects import grammar
from kvmesh.frontend.dialects.parsing.call_sink import CallReader, CallSink
from kvmesh.frontend.dialects.parsing.elements import ElementsReader
from kvmesh.frontend.dialects.parsing.json_calls import (
    ArgumentsReader,
    JsonReader,
    NamedReader,
    NameKeysReader,
)
from kvmesh.frontend.dialects.parsing.pythonic import KeyedReader, PythonReader
from kvmesh.frontend.dialects.parsing.source import OutputSource
from kvmesh.frontend.dialects.parsing.tagged import TaggedReader


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
