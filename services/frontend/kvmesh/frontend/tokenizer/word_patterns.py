"""Patterns of words for `kvmesh._native.WordTokens`, made from a pre-tokenizer's expression. Pure.

A pattern is a list of nodes `(kind, flags, least, most, nexts)`. The first node begins a match;
`flags` has a byte for each ASCII character, 1 for those of a run or of a look-ahead.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

RUN, POSSESSIVE_RUN, NOT_FOLLOWED_BY, FOLLOWED_BY, EITHER, END = range(6)
UNBOUNDED = 2**63
NO_FLAGS = bytes(128)
_REPEAT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
Node = tuple[int, bytes, int, int, tuple[int, ...]]


class UnsupportedPattern(Exception):
    """The expression has a form that the native splitter does not implement."""


class Element(NamedTuple):
    """A part of an expression: characters as a Python pattern of one character, or a symbol.

    Symbols are `(`, `(?=`, `(?!`, `)`, `|` and repeats such as `+`.
    """

    text: str
    is_symbol: bool


class _Parser:
    """Builds the nodes from the last element of the expression to the first."""

    def __init__(self, elements: Sequence[Element]) -> None:
        self._elements = elements
        self.nodes: list[Node] = []

    def add(self, kind: int, next_: Sequence[int], flags: bytes = NO_FLAGS) -> int:
        self.nodes.append((kind, flags, 0, 0, tuple(next_)))
        return len(self.nodes) - 1

    def either(self, start: int, end: int, then: int) -> int:
        """The node of the alternatives between two positions, before the node `then`."""
        parts, depth, first = [], 0, start
        for at in range(start, end):
            depth += self._depth(at)
            if depth == 0 and self._elements[at] == Element("|", True):
                parts.append((first, at))
                first = at + 1
        parts.append((first, end))
        nodes = [self._sequence(*part, then) for part in parts]
        return nodes[0] if len(nodes) == 1 else self.add(EITHER, nodes)

    def _depth(self, at: int) -> int:
        text, is_symbol = self._elements[at]
        return (text.startswith("(") - (text == ")")) if is_symbol else 0

    def _sequence(self, start: int, end: int, then: int) -> int:
        while end > start:
            end -= 1
            repeat = ""
            if self._elements[end].is_symbol and self._elements[end].text != ")":
                repeat = self._elements[end].text
                end -= 1
                if end < start:
                    raise UnsupportedPattern("a repeat of nothing")
            first = self._opening(start, end)
            then = self._item(first, end, repeat, then)
            end = first
        return then

    def _opening(self, start: int, at: int) -> int:
        """The position of the group that ends at `at`, or `at` itself."""
        depth, first = 0, at + 1
        while first > start:
            first -= 1
            depth -= self._depth(first)
            if depth == 0:
                return first
        raise UnsupportedPattern("a group without its begin")

    def _item(self, first: int, last: int, repeat: str, then: int) -> int:
        opening = self._elements[first]
        if not opening.is_symbol:
            return self._run(opening.text, repeat, then)
        if opening.text in ("(?=", "(?!"):
            if last != first + 2 or self._elements[first + 1].is_symbol or repeat:
                raise UnsupportedPattern("a look-ahead at more than one character")
            kind = FOLLOWED_BY if opening.text == "(?=" else NOT_FOLLOWED_BY
            return self.add(kind, [then], _flags(self._elements[first + 1].text))
        inner = self.either(first + 1, last, then)
        if repeat in ("", "?"):
            return self.add(EITHER, [inner, then]) if repeat else inner
        raise UnsupportedPattern(f"a group with {repeat}")

    def _run(self, pattern: str, repeat: str, then: int) -> int:
        possessive = len(repeat) == 2 and repeat[1] == "+"
        least, most = _bounds(repeat[:1] if possessive else repeat)
        kind = POSSESSIVE_RUN if possessive else RUN
        self.nodes.append((kind, _flags(pattern), least, most, (then,)))
        return len(self.nodes) - 1


def _bounds(repeat: str) -> tuple[int, int]:
    simple = {"": (1, 1), "?": (0, 1), "*": (0, UNBOUNDED), "+": (1, UNBOUNDED)}
    if repeat in simple:
        return simple[repeat]
    found = _REPEAT.fullmatch(repeat)
    if found is None:
        raise UnsupportedPattern(f"the repeat {repeat}")
    least = int(found[1])
    return least, int(found[3]) if found[3] else UNBOUNDED if found[2] else least


def _flags(pattern: str) -> bytes:
    """The ASCII characters that a pattern of one character matches."""
    member = re.compile(pattern, re.DOTALL)
    return bytes(member.fullmatch(chr(code)) is not None for code in range(128))


def word_pattern(elements: Sequence[Element]) -> list[Node]:
    """The nodes of an expression; raises UnsupportedPattern."""
    parser = _Parser(elements)
    end = parser.add(END, ())
    first = parser.either(0, len(elements), end)
    order = [first, *(at for at in range(len(parser.nodes)) if at != first)]
    number = {at: new for new, at in enumerate(order)}
    return [
        (kind, flags, least, most, tuple(number[next_] for next_ in nexts))
        for kind, flags, least, most, nexts in (parser.nodes[at] for at in order)
    ]
