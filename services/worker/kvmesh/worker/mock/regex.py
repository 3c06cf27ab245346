"""A string that matches a regular expression, by walking the standard library's parse of it."""

import re
import string
from collections.abc import Iterable
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
MOST_CHARACTERS = 1 << 16


class RegexError(Exception):
    """The expression is malformed, or uses what a generator cannot follow (look-around)."""


def matching(pattern: str, rng: Random) -> str:
    """A string that `pattern` matches from end to end; raises RegexError."""
    try:
        parsed = _parser.parse(pattern)
    except re.error as error:
        raise RegexError(str(error)) from error
    text = _Walk(rng).sequence(parsed)
    if re.fullmatch(pattern, text) is None and re.search(pattern, text) is None:
        raise RegexError(f"{pattern!r} has conditions that the mock cannot follow")
    return text


class _Walk:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._groups: dict[int, str] = {}
        self._left = MOST_CHARACTERS

    def sequence(self, items: Iterable[Any]) -> str:
        return "".join(self._one(op.name, argument) for op, argument in items)

    def _one(self, op: str, argument: Any) -> str:
        self._left -= 1
        if self._left < 0:
            raise RegexError(f"it needs more than {MOST_CHARACTERS} characters")
        match op:
            case "LITERAL":
                return chr(argument)
            case "NOT_LITERAL":
                return self._rng.choice([c for c in _ALPHABET if ord(c) != argument])
            case "ANY":
                return self._rng.choice(_ALPHABET)
            case "IN":
                return self._rng.choice(_members(argument))
            case "CATEGORY":
                return self._rng.choice(_category(argument.name))
            case "BRANCH":
                return self.sequence(self._rng.choice(argument[1]))
            case "SUBPATTERN":
                return self._group(argument[0], argument[-1])
            case "ATOMIC_GROUP":
                return self.sequence(argument)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                return self._repeat(*argument)
            case "GROUPREF":
                return self._groups.get(argument, "")
            case "AT":
                return ""
        raise RegexError(f"{op.lower()} is not supported")

    def _group(self, number: int | None, items: Iterable[Any]) -> str:
        text = self.sequence(items)
        if number is not None:
            self._groups[number] = text
        return text

    def _repeat(self, low: int, high: int, items: Iterable[Any]) -> str:
        count = self._rng.randint(low, min(int(high), low + MORE))
        return "".join(self.sequence(items) for _ in range(count))


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
        raise RegexError("a character class leaves nothing to choose from")
    return found


def _category(name: str) -> str:
    if name in _CATEGORIES:
        return _CATEGORIES[name]
    inside = _CATEGORIES[name.replace("_NOT_", "_")]
    return "".join(c for c in _ALPHABET if c not in inside)
