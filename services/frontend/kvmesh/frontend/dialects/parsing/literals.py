"""Streaming transcoder of model-written values (JSON, near-JSON, Python, Gemma) to JSON.

The output is at any time a prefix of a valid JSON text in the form of `json.dumps`. The transcoder
repairs mistakes that models make in JSON: raw control characters, unescaped quotes inside strings,
stray backslashes, trailing commas, Python's constants, missing closing braces.
"""

import json
import re
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from kvmesh.frontend.dialects.parsing.source import (
    SPACE,
    MalformedOutput,
    MarkerSet,
    OutputSource,
    Steps,
    Unfinished,
)

MAX_DEPTH = 64
MAX_ATOM = 400
Sink = Callable[[str], object]

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_ATOM = re.compile(r"[^\s,:=\[\](){}<>\"']+")
_PLAIN = {quote: re.compile(rf'[^"\\\x00-\x1f{quote}]+') for quote in "\"'"}
_HEX = re.compile(r"[0-9a-fA-F]+")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_VALUE_STARTS = '"{[]-0123456789tfnTFN'
_PYTHON_STARTS = _VALUE_STARTS + "'()"
_WORD = re.compile(r"[A-Za-z_][\w.]*[ \t]*")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


class Style(Struct, frozen=True):
    """The notation of values. `quote`: a string delimiter besides the usual quotes, if any."""

    escapes: Literal["json", "python"] = "json"
    quote: str | None = None
    bare_keys: bool = False


JSON = Style()
PYTHON = Style(escapes="python")


def quoted(text: str) -> str:
    """`text` escaped for a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Transcoder:
    """Reads values from `source` and writes them as JSON to `sink`.

    One of `ends` in place of a closing bracket completes the value. `in_list`: the value is that of
    a Python call in a list of calls.
    """

    def __init__(
        self, source: OutputSource, sink: Sink, style: Style = JSON, ends: tuple[str, ...] = ()
    ) -> None:
        self._source = source
        self._sink = sink
        self._style = style
        self._ends = ends
        self.in_list = False
        self._quote = MarkerSet([style.quote]) if style.quote else None

    def value(self, depth: int = 0, inside: str = "") -> Steps[None]:
        char = yield from self._source.skip_space()
        if not char:
            raise Unfinished
        if depth > MAX_DEPTH:
            raise MalformedOutput
        if char == "{":
            yield from self.object(depth)
        elif char == "[" or (char == "(" and self._style is PYTHON):
            yield from self._array(char, depth)
        elif not (yield from self.string(inside)):
            yield from self._atom()

    def object(self, depth: int = 0) -> Steps[None]:
        source, sink = self._source, self._sink
        source.pos += 1
        sink("{")
        separator = ""
        while not (yield from self._closed("}")):
            sink(separator)
            separator = ", "
            yield from self._key()
            yield from source.skip_space()
            if not (yield from source.literal(":")):
                raise MalformedOutput
            sink(": ")
            yield from self.value(depth + 1, "{")
            yield from self._comma("}")
        sink("}")

    def _array(self, opening: str, depth: int) -> Steps[None]:
        self._source.pos += 1
        self._sink("[")
        separator = ""
        while not (yield from self._closed(_CLOSERS[opening])):
            self._sink(separator)
            separator = ", "
            yield from self.value(depth + 1, "[")
            yield from self._comma(_CLOSERS[opening])
        self._sink("]")

    def _closed(self, closer: str) -> Steps[bool]:
        """Read the closing bracket; an end marker replaces all missing ones and stays unread."""
        char = yield from self._source.skip_space()
        if char == closer:
            self._source.pos += 1
            return True
        if not char:
            raise Unfinished
        return bool(self._ends) and (yield from self._source.follows(self._ends))

    def _comma(self, closer: str) -> Steps[None]:
        char = yield from self._source.skip_space()
        if char == ",":
            self._source.pos += 1
        elif char and char != closer and not (yield from self._at_end()):
            raise MalformedOutput

    def _at_end(self) -> Steps[bool]:
        return bool(self._ends) and (yield from self._source.follows(self._ends))

    def _key(self) -> Steps[None]:
        if (yield from self.string(":")):
            return
        name = yield from self._source.match(_ATOM, MAX_ATOM)
        if not name or not self._style.bare_keys:
            self._source.pos -= len(name)
            raise MalformedOutput
        if not (yield from self._source.peek()):
            raise Unfinished
        self._sink(f'"{quoted(name)}"')

    def _atom(self) -> Steps[None]:
        text = yield from self._source.match(_ATOM, MAX_ATOM)
        if text.lower() in _CONSTANTS:
            self._sink(_CONSTANTS[text.lower()])
        elif _NUMBER.match(text):
            self._sink(text)
        elif self._style is not JSON and text.isdecimal():  # with zeros before it
            self._sink(str(int(text)))
        elif self._source.pos < len(self._source.text):
            self._source.pos -= len(text)
            raise MalformedOutput
        else:
            raise Unfinished

    # --- strings ---

    def string(self, inside: str = "") -> Steps[bool]:
        """Read a string if one begins here.

        `inside` is the bracket that encloses it, "(" for an argument by keyword, "" for one by
        position, ":" for a key.
        """
        if self._quote and (yield from self._source.literal(*self._quote.markers)):
            yield from self._delimited(self._quote)
            return True
        python = self._style.escapes == "python"
        options = ('"""', "'''", '"', "'") if python else ('"',)
        quote = yield from self._source.literal(*options)
        if quote is None:
            return False
        if len(quote) == 3:
            yield from self._python_long(quote)
        elif python:
            self._sink('"')
            yield from self._python(quote, inside)
            self._sink('"')
        else:
            yield from self._json(inside)
        return True

    def _delimited(self, markers: MarkerSet) -> Steps[None]:
        """Read up to the delimiter, without escapes."""
        self._sink('"')
        stop = None
        while stop is None:
            text, stop = yield from self._source.until(markers)
            if stop is None and self._source.closed:
                raise Unfinished
            self._sink(quoted(text))
        self._sink('"')

    def _json(self, inside: str) -> Steps[None]:
        source, sink = self._source, self._sink
        sink('"')
        while True:
            self._copy_plain('"')
            char = yield from source.peek()
            if not char:
                raise Unfinished
            if char == "\\":
                yield from self._json_escape()
            elif char == '"':
                if (yield from self._closes_string(inside)):
                    break
                source.pos += 1
                sink('\\"')
            elif char < " ":
                source.pos += 1
                sink(quoted(char))
        source.pos += 1
        sink('"')

    def _copy_plain(self, quote: str) -> None:
        """Copy characters that need no escaping."""
        source = self._source
        found = _PLAIN[quote].match(source.text, source.pos)
        if found:
            self._sink(found[0])
            source.pos = found.end()

    def _json_escape(self) -> Steps[None]:
        source = self._source
        source.pos += 1
        char = yield from source.peek()
        if not char:
            raise Unfinished
        if char == "u":
            yield from self._json_unicode()
            return
        if char in '"\\/bfnrt':
            source.pos += 1
            self._sink(f"\\{char}")
        else:
            self._sink("\\\\")

    def _json_unicode(self) -> Steps[None]:
        source = self._source
        while len(source.text) - source.pos < 5 and not source.closed:
            yield
        digits = source.text[source.pos + 1 : source.pos + 5]
        if len(digits) == 4 and _HEX.fullmatch(digits):
            source.pos += 5
            self._sink(f"\\u{digits}")
        else:
            self._sink("\\\\")

    def _closes_string(self, inside: str) -> Steps[bool]:
        """True if the quote here closes its string, judging by the text after it; reads nothing.

        Always true in valid JSON.
        """
        char, offset = yield from self._next_character(1)
        if inside == ":":
            return char in ("", ":")
        if char == ",":
            char, _ = yield from self._next_character(offset + 1)
            return not char or char in ('"}' if inside == "{" else _VALUE_STARTS)
        if not char or char == _CLOSERS.get(inside):
            return True
        return bool(self._ends) and (yield from self._source.follows(self._ends, offset))

    def _next_character(self, offset: int) -> Steps[tuple[str, int]]:
        """The first character from `offset` on that is not white space, and its offset."""
        source = self._source
        while True:
            while source.pos + offset < len(source.text):
                char = source.text[source.pos + offset]
                if char not in SPACE:
                    return char, offset
                offset += 1
            if source.closed:
                return "", offset
            yield

    def _python(self, quote: str, inside: str) -> Steps[None]:
        """Read up to the quote that closes the string, which may have raw lines and quotes."""
        source = self._source
        while True:
            self._copy_plain(quote)
            char = yield from source.peek()
            if not char:
                raise Unfinished
            if char == "\\":
                self._sink(quoted((yield from self._python_escape())))
                continue
            if char == quote and (yield from self._closes_python(inside)):
                source.pos += 1
                return
            if char == quote or char == '"' or char < " ":
                source.pos += 1
                self._sink(quoted(char))

    def _closes_python(self, inside: str) -> Steps[bool]:
        """As `_closes_string`; always true in valid Python without joined strings."""
        char, offset = yield from self._next_character(1)
        if not char:
            return True
        if inside == ":":
            return char == ":"
        if char == ",":
            char, offset = yield from self._next_character(offset + 1)
            starts = {"(": ")", "{": "\"'}"}.get(inside, _PYTHON_STARTS)
            if not char or char in starts:
                return True
            return inside in ("(", "") and (yield from self._word_before("=", offset))
        if inside in ("(", "") and char == ")":
            return (yield from self._call_ends(offset + 1))
        return char == _CLOSERS.get(inside) or (inside == "[" and char == ")")

    def _call_ends(self, offset: int) -> Steps[bool]:
        """True if nothing but another call or the end of all calls follows."""
        char, offset = yield from self._next_character(offset)
        if char in ("", "]"):
            return True
        if char in ",;":
            _, offset = yield from self._next_character(offset + 1)
        elif self._ends and (yield from self._source.follows(self._ends, offset)):
            return True
        elif self.in_list:
            return False
        return (yield from self._word_before("(", offset))

    def _word_before(self, char: str, offset: int) -> Steps[bool]:
        """True if a name and then `char` follow `offset` characters from here."""
        source = self._source
        while True:
            found = _WORD.match(source.text, source.pos + offset)
            end = found.end() if found else source.pos + offset
            if end < len(source.text):
                return found is not None and source.text[end] == char
            if source.closed:
                return True
            yield

    def _python_long(self, quote: str) -> Steps[None]:
        markers = MarkerSet([quote, "\\"])
        self._sink('"')
        while True:
            text, stop = yield from self._source.until(markers)
            self._sink(quoted(text))
            if stop == quote:
                break
            if stop == "\\":
                self._source.pos -= 1
                self._sink(quoted((yield from self._python_escape())))
        self._sink('"')

    def _python_escape(self) -> Steps[str]:
        source = self._source
        source.pos += 1
        char = yield from source.peek()
        if not char:
            raise Unfinished
        width = {"x": 2, "u": 4, "U": 8}.get(char, 0)
        if width:
            while len(source.text) - source.pos <= width and not source.closed:
                yield
            digits = source.text[source.pos + 1 : source.pos + 1 + width]
            if len(digits) == width and _HEX.fullmatch(digits) and int(digits, 16) < 0x110000:
                source.pos += 1 + width
                return chr(int(digits, 16))
        source.pos += 1
        if char == "\n":
            return ""
        if char in "\\'\"":
            return char
        return _PYTHON_ESCAPES.get(char, f"\\{char}")
