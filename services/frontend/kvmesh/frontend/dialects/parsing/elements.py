"""Reader of tool calls with one element per argument and nested elements for objects and lists."""

import re
from typing import Any

from kvmesh.frontend.dialects.grammar import Elements
from kvmesh.frontend.dialects.parsing.call_sink import MAX_NAME, CallSink, opened, read_name
from kvmesh.frontend.dialects.parsing.coerce import Schema, coerce, property_kinds, resolve
from kvmesh.frontend.dialects.parsing.literals import MAX_DEPTH, Sink, quoted
from kvmesh.frontend.dialects.parsing.source import (
    MalformedOutput,
    MarkerSet,
    OutputSource,
    Steps,
    Unfinished,
)

_KEY = re.compile(r"[^\s<>/][^<>]*")


class ElementsReader:
    """Reads elements as members, or as items of a list, and types their text by the schema."""

    def __init__(
        self, form: Elements, source: OutputSource, sink: CallSink, ends: tuple[str, ...]
    ) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._begin = form.mark + "<"
        self._item = (f"{self._begin}{form.item}>",)
        self._after_call = (*form.close, *ends)
        self._root: Schema = {}

    def call(self) -> Steps[bool]:
        form, source, sink = self._form, self._source, self._sink
        if not (yield from opened(source, form.open)):
            return False
        quote = yield from source.literal('"', "'")
        sink.name((yield from read_name(source)))
        if quote:
            yield from source.literal(quote)
        if not (yield from source.literal(*form.open_end)):
            raise MalformedOutput
        self._root = sink.schema()
        yield from self._members(self._root, self._after_call, 0)
        sink.end()
        yield from source.literal(*form.close)
        return True

    def _members(self, schema: Schema, closers: tuple[str, ...], depth: int) -> Steps[None]:
        """Read elements as members of an object, up to one of `closers`, which stays unread."""
        separator = "{"
        while not (yield from self._source.follows(closers)):
            key = yield from self._key()
            self._sink.arguments(f'{separator}"{quoted(key)}": ')
            separator = ", "
            yield from self._value(key, _member(schema, key), depth)
        yield from self._source.skip_space()
        self._sink.arguments("{}" if separator == "{" else "}")

    def _items(self, schema: Schema, closer: str, depth: int) -> Steps[None]:
        """Read elements as items of a list, up to `closer`, which stays unread."""
        separator = "["
        while not (yield from self._source.follows((closer,))):
            key = yield from self._key()
            self._sink.arguments(separator)
            separator = ", "
            yield from self._value(key, schema.get("items"), depth)
        yield from self._source.skip_space()
        self._sink.arguments("[]" if separator == "[" else "]")

    def _key(self) -> Steps[str]:
        yield from self._source.skip_space()
        if not (yield from self._source.literal(self._begin)):
            raise MalformedOutput
        key = yield from self._source.match(_KEY, MAX_NAME)
        if not key or not (yield from self._source.literal(">")):
            raise MalformedOutput
        return key

    def _value(self, key: str, schema: Any, depth: int) -> Steps[None]:
        """Read the content of an element, and its end."""
        source, sink = self._source, self._sink
        if depth > MAX_DEPTH:
            raise MalformedOutput
        closer = f"{self._begin}/{key}>"
        kinds = property_kinds({**self._root, "properties": {key: schema}}, key)
        if kinds == {"string"}:
            sink.arguments('"')
            yield from self._text(closer, lambda text: sink.arguments(quoted(text)))
            sink.arguments('"')
            return
        empty = yield from source.follows((closer,))
        nested = not empty and (yield from source.follows((self._begin,)))
        listed = nested and "object" not in kinds and (yield from source.follows(self._item))
        if listed or (kinds == {"array"} and (empty or nested)):
            yield from self._items(_structure(schema, self._root), closer, depth + 1)
        elif nested or (empty and kinds == {"object"}):
            yield from self._members(_structure(schema, self._root), (closer,), depth + 1)
        else:
            parts: list[str] = []
            yield from self._text(closer, parts.append)
            sink.arguments(coerce("".join(parts), kinds))
            return
        yield from source.literal(closer)

    def _text(self, closer: str, sink: Sink) -> Steps[None]:
        stop, ends = None, MarkerSet([closer])
        while stop is None:
            text, stop = yield from self._source.until(ends)
            if stop is None and self._source.closed:
                raise Unfinished
            sink(text)


def _member(schema: Schema, key: str) -> Any:
    """The schema of a member of an object; None if it is unknown."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return schema.get("additionalProperties") if found is None else found


def _structure(node: Any, root: Schema, depth: int = 8) -> Schema:
    """The part of a schema that describes members or items; {} if it has none."""
    if not isinstance(node, dict) or depth == 0:
        return {}
    if isinstance(node.get("$ref"), str):
        return _structure(resolve(node["$ref"], root), root, depth - 1)
    if "properties" in node or "items" in node or "additionalProperties" in node:
        return node
    options = [option for key in ("anyOf", "oneOf", "allOf") for option in node.get(key) or []]
    found = (_structure(option, root, depth - 1) for option in options)
    return next((schema for schema in found if schema), {})
