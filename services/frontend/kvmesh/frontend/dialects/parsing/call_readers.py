"""Factory of the reader for a form of tool calls."""

from kvmesh.frontend.dialects.grammar import CallForm, JsonObjects, NamedJson, Pythonic, Tagged
from kvmesh.frontend.dialects.parsing.call_sink import CallReader, CallSink
from kvmesh.frontend.dialects.parsing.json_calls import JsonReader, NamedReader
from kvmesh.frontend.dialects.parsing.pythonic import KeyedReader, PythonReader
from kvmesh.frontend.dialects.parsing.source import OutputSource
from kvmesh.frontend.dialects.parsing.tagged import TaggedReader


def call_reader(
    form: CallForm,
    source: OutputSource,
    sink: CallSink,
    ends: tuple[str, ...],
    begins: tuple[str, ...],
) -> CallReader:
    """The reader of `form`; `begins` and `ends` are the markers of a section of calls."""
    if isinstance(form, JsonObjects):
        return JsonReader(form, source, sink, ends)
    if isinstance(form, NamedJson):
        return NamedReader(form, source, sink, ends)
    if isinstance(form, Tagged):
        return TaggedReader(form, source, sink, ends, begins)
    if isinstance(form, Pythonic):
        return PythonReader(source, sink, ends)
    return KeyedReader(form, source, sink)
