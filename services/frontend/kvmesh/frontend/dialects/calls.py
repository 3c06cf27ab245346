"""Which reader reads a form of tool calls."""

from kvmesh.frontend.dialects.callsink import CallReader, CallSink
from kvmesh.frontend.dialects.grammar import Form, JsonObjects, NamedJson, Pythonic, Tagged
from kvmesh.frontend.dialects.jsoncalls import JsonReader, NamedReader
from kvmesh.frontend.dialects.pythonic import KeyedReader, PythonReader
from kvmesh.frontend.dialects.source import Source
from kvmesh.frontend.dialects.tagged import TaggedReader


def call_reader(form: Form, source: Source, sink: CallSink, ends: tuple[str, ...]) -> CallReader:
    """`ends` close the section that the calls stand in."""
    if isinstance(form, JsonObjects):
        return JsonReader(form, source, sink, ends)
    if isinstance(form, NamedJson):
        return NamedReader(form, source, sink, ends)
    if isinstance(form, Tagged):
        return TaggedReader(form, source, sink, ends)
    if isinstance(form, Pythonic):
        return PythonReader(source, sink)
    return KeyedReader(form, source, sink)
