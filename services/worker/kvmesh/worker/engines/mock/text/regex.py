"""Generates a string that matches a regular expression, from the standard library's parse of it."""

import re
import string
from collections.abc import Iterable, Sequence
from importlib import import_module
from random import Random
from typing import Any

_parser: Any = import_module("re._parser")
_ALPHABET = [chr(code) for code in range(32, 127)]
_CATEGORIES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_SPACE": " ",
    "CATEGORY_WORD": string.ascii_letters + string.digits + "_",
}
MORE = 4
MAX_CHARACTERS = 1 << 16
MAX_PATTERN = 1 << 16
# cost of parsing an expression, in steps: a schema may have thousands, and parsing blocks the
# event loop of the engine
PARSING = 800
PARSING_CHARACTER = 16
_WORD = set(_CATEGORIES["CATEGORY_WORD"])


class RegexError(Exception):
    """The expression is malformed, or has a feature that the generator lacks (look-around)."""


class StepBudget:
    """The remaining work for one constraint, in steps and characters together."""

    def __init__(self, limit: int = MAX_CHARACTERS) -> None:
        self._limit = self._left = limit

    def spend(self, steps: int) -> None:
        """Spend `steps`; raises RegexError if too few are left."""
        self._left -= steps
        if self._left < 0:
            raise RegexError(f"it needs more than {self._limit} characters or steps")


def matching_string(pattern: str, rng: Random, steps: StepBudget | None = None) -> str:
    """A string that `pattern` matches from end to end; raises RegexError.

    The string is written along a path through the expression and never checked with a matcher,
    since matching may take exponential time.
    """
    if len(pattern) > MAX_PATTERN:
        raise RegexError(f"it has more than {MAX_PATTERN} characters")
    reading = PARSING + PARSING_CHARACTER * len(pattern)
    steps = steps or StepBudget(MAX_CHARACTERS + reading)
    steps.spend(reading)
    try:
        parsed = _parser.parse(pattern)
    except re.error as error:
        raise RegexError(str(error)) from error
    return _Walk(rng, parsed.state.flags, steps).text(parsed)


class _Walk:
    """One path through an expression."""

    def __init__(self, rng: Random, flags: int, steps: StepBudget) -> None:
        self._rng = rng
        self._multiline = bool(flags & re.MULTILINE)
        self._written: list[str] = []
        self._size = 0
        self._anchors: list[tuple[str, int]] = []
        self._groups: dict[int, str] = {}
        self._members: dict[int, list[str]] = {}
        self._spend = steps.spend

    def text(self, items: Iterable[Any]) -> str:
        """A text that the whole expression matches."""
        self._walk(items)
        text = "".join(self._written)
        for name, index in self._anchors:
            if not self._anchor_matches(name, text, index):
                raise RegexError("it has anchors that the mock cannot satisfy")
        return text

    def _walk(self, items: Iterable[Any]) -> None:
        for op, argument in items:
            self._visit(op.name, argument)

    def _write(self, text: str) -> None:
        self._spend(len(text))
        self._written.append(text)
        self._size += len(text)

    def _visit(self, op: str, argument: Any) -> None:
        self._spend(1)
        match op:
            case "LITERAL":
                self._write(chr(argument))
            case "NOT_LITERAL":
                self._write(self._rng.choice([c for c in _ALPHABET if ord(c) != argument]))
            case "ANY":
                self._write(self._rng.choice(_ALPHABET))
            case "IN":
                self._write(self._rng.choice(self._members_of(argument)))
            case "CATEGORY":
                self._write(self._rng.choice(_category(argument.name)))
            case "BRANCH":
                self._walk(self._rng.choice(argument[1]))
            case "SUBPATTERN":
                self._group(argument[0], argument[-1])
            case "MAX_REPEAT" | "MIN_REPEAT":
                self._repeat(*argument)
            case "GROUPREF":
                self._write(self._group_text(argument))
            case "AT":
                self._anchors.append((argument.name, self._size))
            case _:
                raise RegexError(f"{op.lower()} is not supported")

    def _group(self, number: int | None, items: Iterable[Any]) -> None:
        start = len(self._written)
        self._walk(items)
        if number is not None:
            self._groups[number] = text = "".join(self._written[start:])
            self._spend(len(text))

    def _group_text(self, number: int) -> str:
        if number not in self._groups:
            raise RegexError(f"group {number} may have no value")
        return self._groups[number]

    def _repeat(self, low: int, high: int, items: Sequence[Any]) -> None:
        self._spend(min(int(low), MAX_CHARACTERS + 1))
        for _ in range(self._rng.randint(low, min(int(high), low + MORE))):
            self._walk(items)

    def _members_of(self, items: Sequence[Any]) -> list[str]:
        found = self._members.get(id(items))
        if found is None:
            found = self._members[id(items)] = _members(items)
        return found

    def _anchor_matches(self, name: str, text: str, index: int) -> bool:
        """True if an anchor at `index` of the finished text matches there."""
        lines = self._multiline
        match name:
            case "AT_BEGINNING" | "AT_BEGINNING_LINE":
                return not index or (lines and text[index - 1] == "\n")
            case "AT_BEGINNING_STRING":
                return not index
            case "AT_END" | "AT_END_LINE":
                rest = text[index:]
                return rest in ("", "\n") or (lines and rest[0] == "\n")
            case "AT_END_STRING":
                return index == len(text)
        inside = (index > 0 and text[index - 1] in _WORD) != (
            index < len(text) and text[index] in _WORD
        )
        return inside == (name == "AT_BOUNDARY")


def _members(items: Iterable[Any]) -> list[str]:
    chosen: set[str] = set()
    negate = False
    for op, argument in items:
        match op.name:
            case "NEGATE":
                negate = True
            case "LITERAL":
                chosen.add(chr(argument))
            case "RANGE":
                chosen.update(chr(c) for c in range(argument[0], min(argument[1], 0x2FF) + 1))
            case "CATEGORY":
                chosen.update(_category(argument.name))
    found = [c for c in _ALPHABET if c not in chosen] if negate else sorted(chosen)
    if not found:
        raise RegexError("a character class is empty")
    return found


def _category(name: str) -> str:
    if name in _CATEGORIES:
        return _CATEGORIES[name]
    inside = _CATEGORIES[name.replace("_NOT_", "_")]
    return "".join(c for c in _ALPHABET if c not in inside)
