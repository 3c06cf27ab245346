"""Readers of tool calls with JSON arguments, by the place of the function's name.

`JsonReader`: beside the arguments; `NameKeysReader`: as their key; `NamedReader`: between markers;
`ArgumentsReader`: elsewhere.
"""

import json
import re

from kvmesh.frontend.dialects.grammar import JsonObjects, NamedJson
from kvmesh.frontend.dialects.parsing.call_sink import (
    MAX_NAME,
    CallSink,
    opened,
    read_name,
    skip,
)
from kvmesh.frontend.dialects.parsing.literals import JSON, Transcoder
from kvmesh.frontend.dialects.parsing.source import (
    MalformedOutput,
    OutputSource,
    Steps,
    Unfinished,
    marker_set,
)

_ID = re.compile(rf'[^<>{{}}"]{{0,{MAX_NAME}}}')
_GAPS = ("", "\n", "\r\n", " ")  # between the mark of a call and its object


class JsonReader:
    """Reads objects with a name and arguments among their members, in any order."""

    def __init__(
        self, form: JsonObjects, source: OutputSource, sink: CallSink, ends: tuple[str, ...]
    ) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._ends = (*form.close, *ends)
        gaps = [o + gap + bracket for o in form.open for gap in _GAPS for bracket in "{["]
        self._opened = tuple(gaps)

    def call(self) -> Steps[bool]:
        source = self._source
        if self._opened and (yield from source.follows(self._opened)):
            yield from source.skip_space()
            yield from source.literal(*self._form.open)
        if (yield from source.skip_space()) == "[" and (yield from source.follows(("{",), 1)):
            source.pos += 1
            yield from source.skip_space()
        if not (yield from source.literal("{")):
            return False
        form, name, written, pending = self._form, "", False, ""
        others = False  # members that may be the arguments under another key
        while not (yield from self._closed(written)):
            key = yield from self._string(":")
            yield from self._colon()
            if key in form.names and not name:
                name = yield from self._string("{")
                self._sink.name(name)
            elif key in form.arguments and not written:
                written, pending = yield from self._arguments(bool(name))
            elif form.bare and key not in ("type", "id", *form.names):
                raise MalformedOutput
            else:
                others |= _holds_members((yield from self._value()))
            yield from self._comma()
        # an object with nothing but a name may be an answer in JSON
        if not name or (form.bare and pending in ("", "{}") and not self._sink.known(name)):
            raise MalformedOutput
        if not written:
            if not pending and others:
                raise MalformedOutput
            self._sink.arguments(pending or "{}")
            self._sink.end()
        yield from skip(source, ("]", *form.close))
        return True

    def _closed(self, written: bool) -> Steps[bool]:
        if not (yield from self._source.skip_space()):
            if written:
                return True
            raise Unfinished
        if (yield from self._source.literal("}")):
            return True
        return bool(self._ends) and (yield from self._source.follows(self._ends))

    def _colon(self) -> Steps[None]:
        yield from self._source.skip_space()
        if not (yield from self._source.literal(":")):
            raise MalformedOutput
        yield from self._source.skip_space()

    def _comma(self) -> Steps[None]:
        yield from self._source.skip_space()
        yield from self._source.literal(",")

    def _string(self, inside: str) -> Steps[str]:
        parts: list[str] = []
        coder = Transcoder(self._source, parts.append, JSON, self._ends)
        if not (yield from coder.string(inside)):
            raise MalformedOutput
        text = str(json.loads("".join(parts)))
        if len(text) > MAX_NAME or "\n" in text:  # its quote is missing, and it has read on
            raise MalformedOutput
        return text

    def _value(self) -> Steps[str]:
        parts: list[str] = []
        yield from Transcoder(self._source, parts.append, JSON, self._ends).value(1, "{")
        return "".join(parts)

    def _arguments(self, named: bool) -> Steps[tuple[bool, str]]:
        """(True, "") if the sink has the arguments, (False, arguments) if they await a name."""
        char = yield from self._source.peek()
        if char == "{" and named:
            coder = Transcoder(self._source, self._sink.arguments, JSON, self._ends)
            yield from coder.object(1)
            self._sink.end()
            return True, ""
        arguments = _unwrap((yield from self._value()))
        if not named:
            return False, arguments
        self._sink.arguments(arguments)
        self._sink.end()
        return True, ""


def _holds_members(value: str) -> bool:
    """True for an object that is not empty, perhaps in a string."""
    return value.removeprefix('"').startswith("{") and value.strip('"') != "{}"


def _unwrap(text: str) -> str:
    """Arguments as a JSON object, from an object, an object in a string, or null."""
    value = json.loads(text)
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise MalformedOutput from error
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise MalformedOutput
    return json.dumps(value, ensure_ascii=False)


class NamedReader:
    """Reads a name between markers, then a JSON object."""

    def __init__(
        self, form: NamedJson, source: OutputSource, sink: CallSink, ends: tuple[str, ...]
    ) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._ends = (*form.close, *ends)
        self._name = re.compile(form.name)

    def call(self) -> Steps[bool]:
        form, source, sink = self._form, self._source, self._sink
        if not (yield from opened(source, form.open)):
            return False
        yield from skip(source, form.before)
        yield from source.skip_space()
        if form.id_end:
            yield from self._id(form.id_end)
        whole = yield from read_name(source)
        short = self._name.fullmatch(whole)
        sink.name(short[1] if short else whole)
        if form.call_id:
            yield from source.skip_space()
            if (yield from source.literal(form.call_id)):
                yield from read_name(source)
        yield from skip(source, form.between)
        yield from _object(source, sink, self._ends)
        yield from skip(source, form.close)
        return True

    def _id(self, id_end: str) -> Steps[None]:
        """Skip the id before the name."""
        found, stop, ends = "", None, marker_set((id_end,))
        while stop is None:
            text, stop = yield from self._source.until(ends)
            found += text
            if not _ID.fullmatch(found):
                raise MalformedOutput
        yield from self._source.skip_space()


class NameKeysReader:
    """Reads objects whose keys are names, and whose values are arguments."""

    def __init__(self, source: OutputSource, sink: CallSink, ends: tuple[str, ...]) -> None:
        self._source = source
        self._sink = sink
        self._ends = ends

    def call(self) -> Steps[bool]:
        source, sink = self._source, self._sink
        if (yield from source.skip_space()) == "[":
            source.pos += 1
            yield from source.skip_space()
        if not (yield from source.literal("{")):
            return False
        yield from source.skip_space()
        name: list[str] = []
        if not (yield from Transcoder(source, name.append, JSON, self._ends).string(":")):
            raise MalformedOutput
        yield from source.skip_space()
        if not (yield from source.literal(":")):
            raise MalformedOutput
        sink.name(str(json.loads("".join(name))))
        yield from _object(source, sink, self._ends)
        yield from source.skip_space()
        yield from source.literal("}")
        yield from skip(source, ("]",))
        return True


class ArgumentsReader:
    """Reads the arguments of a call whose function is named."""

    def __init__(self, source: OutputSource, sink: CallSink, ends: tuple[str, ...]) -> None:
        self._source = source
        self._sink = sink
        self._ends = ends

    def call(self) -> Steps[bool]:
        yield from _object(self._source, self._sink, self._ends)
        return True


def _object(source: OutputSource, sink: CallSink, ends: tuple[str, ...]) -> Steps[None]:
    """Read the arguments and end the call."""
    if (yield from source.skip_space()) != "{":
        raise MalformedOutput
    yield from Transcoder(source, sink.arguments, JSON, ends).object()
    sink.end()
