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
    """Reads elements as members, or as items of a list, and types their text by the schema.

    A text whose closing tag is missing ends at the tag of another member that its object still
    lacks, at the end of that object, or at a tag that ends the call, if nothing but another call or
    the end of the output follows it. In a call that the text contains, such tags are text.
    """

    def __init__(
        self, form: Elements, source: OutputSource, sink: CallSink, ends: tuple[str, ...]
    ) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._begin = form.mark + "<"
        self._item = (f"{self._begin}{form.item}>",)
        self._after_call = (*form.close, *ends, *form.open)
        self._closers = {
            **dict.fromkeys(ends, form.open),
            **dict.fromkeys(form.close, (*ends, *form.open)),
        }
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
        properties = schema.get("properties")
        # None: any member may follow
        lacks = set(properties) if isinstance(properties, dict) and properties else None
        while not (yield from self._source.follows(closers)):
            key = yield from self._key()
            self._sink.arguments(f'{separator}"{quoted(key)}": ')
            separator = ", "
            if lacks is not None:
                lacks.discard(key)
            yield from self._value(key, _member(schema, key), depth, lacks, closers)
        yield from self._source.skip_space()
        self._sink.arguments("{}" if separator == "{" else "}")

    def _items(self, schema: Schema, closer: str, depth: int) -> Steps[None]:
        """Read elements as items of a list, up to `closer`, which stays unread."""
        separator = "["
        while not (yield from self._source.follows((closer,))):
            key = yield from self._key()
            self._sink.arguments(separator)
            separator = ", "
            yield from self._value(key, schema.get("items"), depth, {key}, (closer,))
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

    def _value(
        self, key: str, schema: Any, depth: int, lacks: set[str] | None, closers: tuple[str, ...]
    ) -> Steps[None]:
        """Read the content of an element, and its end.

        `lacks`: the names of elements that may follow it, None if any may; `closers`: the tags that
        may follow them.
        """
        source, sink = self._source, self._sink
        if depth > MAX_DEPTH:
            raise MalformedOutput
        closer = f"{self._begin}/{key}>"
        kinds = property_kinds({**self._root, "properties": {key: schema}}, key)
        if kinds == {"string"}:
            sink.arguments('"')
            yield from self._text(closer, lambda text: sink.arguments(quoted(text)), lacks, closers)
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
            yield from self._text(closer, parts.append, lacks, closers)
            sink.arguments(coerce("".join(parts), kinds))
            return
        yield from source.literal(closer)

    def _text(
        self, closer: str, sink: Sink, lacks: set[str] | None, closers: tuple[str, ...]
    ) -> Steps[None]:
        """Read text up to `closer`, or to a tag before which that is missing."""
        source, stops = self._source, MarkerSet([closer, self._begin])
        begin = closer.replace("/", "", 1)
        calls = same = 0  # calls in the text that are open, and elements with its name in them
        while True:
            text, stop = yield from source.until(stops)
            if stop is None and source.closed:
                raise Unfinished
            sink(text)
            if stop is None:
                continue
            if stop == closer and not same:
                return
            source.pos -= len(stop)
            tag = yield from self._tag()
            if tag.startswith(self._form.open):
                calls += 1
            elif calls:
                calls -= tag in self._form.close
                same += (tag == begin) - (tag == closer)
            elif (yield from self._ends_text(tag, lacks, closers)):
                return
            source.pos += len(stop)
            sink(stop)

    def _tag(self) -> Steps[str]:
        """The tag here, left unread; a part of it if it does not end soon."""
        source, mark = self._source, len(self._begin)
        while True:
            end = source.text.find(">", source.pos + mark, source.pos + MAX_NAME)
            tag = source.text[source.pos : end + 1 if end >= 0 else source.pos + MAX_NAME]
            if end >= 0 or len(tag) == MAX_NAME or "<" in tag[mark:] or source.closed:
                return tag
            yield

    def _ends_text(self, tag: str, lacks: set[str] | None, closers: tuple[str, ...]) -> Steps[bool]:
        """True if the tag here ends a text whose closing tag is missing."""
        key = tag.removeprefix(self._begin).removesuffix(">")
        if key and tag.endswith(">") and not key.startswith("/"):
            return lacks is None or key in lacks
        if tag not in self._closers:
            return tag in closers
        try:
            return (yield from self._source.follows(self._closers[tag], len(tag)))
        except Unfinished:
            return True


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
