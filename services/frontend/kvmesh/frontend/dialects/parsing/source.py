"""Text that arrives in pieces, read by grammars written as generators.

A grammar yields whenever it needs more text than has arrived; `OutputSource` holds what it
has not read yet, and, while an attempt may still fail, what it has read since the attempt began.
"""

import re
from collections.abc import Generator, Iterable
from functools import cache
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]

SPACE = " \t\r\n"
_SPACES = frozenset(SPACE)


class MalformedOutput(Exception):
    """What was read is not what the grammar asks for."""


class Unfinished(MalformedOutput):
    """The output ended inside of it."""


class Stops:
    """Markers to look for, the longest first where several begin at one place."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = sorted({m for m in markers if m}, key=len, reverse=True)
        self.longest = max(map(len, self.markers), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")
        heads = "".join(re.escape(m[0]) for m in self.markers)
        self._head = re.compile(f"[{heads}]" if heads else r"(?!)")

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def held(self, text: str, start: int) -> int:
        """Where at the end of `text` a marker may have begun; its length if none has."""
        place = max(start, len(text) - self.longest + 1)
        while match := self._head.search(text, place):
            place = match.start()
            rest = text[place:]
            if any(m.startswith(rest) for m in self.markers):
                return place
            place += 1
        return len(text)

    def none_begins_in(self, text: str) -> bool:
        return self._head.search(text) is None

    def may_grow(self, marker: str) -> bool:
        return any(m != marker and m.startswith(marker) for m in self.markers)


@cache
def stops(markers: tuple[str, ...]) -> Stops:
    """Made once per grammar: they hold no state."""
    return Stops(markers)


class OutputSource:
    """The unread rest of the output so far; `closed` once there will be no more of it."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(self.text[: self.pos])
        self.text = self.text[self.pos :] + text
        self.pos = 0

    @property
    def is_read(self) -> bool:
        """Nothing is left to read, and nothing kept that might be read again."""
        return self.pos == len(self.text) and self._kept is None

    # --- attempts ---

    def keep(self, back: int = 0) -> None:
        """From `back` characters ago on, what is read can be had again with `rewind`."""
        self._kept = []
        self.text = self.text[self.pos - back :]
        self.pos = back

    def rewind(self) -> None:
        if self._kept is not None:
            self.text = "".join(self._kept) + self.text
            self.pos = 0
            self._kept = None

    def release(self) -> None:
        self._kept = None

    # --- reading ---

    def peek(self) -> Steps[str]:
        """The next character, unread; nothing at the end."""
        while self.pos >= len(self.text):
            if self.closed:
                return ""
            yield
        return self.text[self.pos]

    def skip_space(self) -> Steps[str]:
        """Skips white space; the next character, unread."""
        while True:
            char = yield from self.peek()
            if not char or char not in SPACE:
                return char
            self.pos += 1

    def literal(self, *options: str) -> Steps[str | None]:
        """Reads the longest of `options` that stands here; None if none does."""
        end = self.pos + max(map(len, options), default=0)
        while True:
            rest = self.text[self.pos : end]
            unsettled = [o for o in options if len(o) > len(rest) and o.startswith(rest)]
            if not unsettled or self.closed:
                break
            yield
        fits = [o for o in options if o and rest.startswith(o)]
        if not fits:
            return None
        best = max(fits, key=len)
        self.pos += len(best)
        return best

    def match(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Reads what matches here, all of it even if it comes in pieces; perhaps nothing."""
        while True:
            found = pattern.match(self.text, self.pos)
            end = found.end() if found else self.pos
            if end - self.pos > limit:
                raise MalformedOutput
            if end < len(self.text) or self.closed:
                break
            yield
        read, self.pos = self.text[self.pos : end], end
        return read

    def until(self, stops: Stops) -> Steps[tuple[str, str | None]]:
        """Some text, and the marker behind it (read as well) unless more text may follow first."""
        while True:
            found = stops.find(self.text, self.pos)
            if found and (
                found.end() < len(self.text) or self.closed or not stops.may_grow(found[0])
            ):
                text, self.pos = self.text[self.pos : found.start()], found.end()
                return text, found[0]
            held = found.start() if found else len(self.text)
            if not self.closed and not found:
                held = stops.held(self.text, self.pos)
            if held > self.pos:
                text, self.pos = self.text[self.pos : held], held
                return text, None
            if self.closed:
                raise Unfinished
            yield

    def ahead(self, options: tuple[str, ...], offset: int = 0) -> Steps[bool]:
        """Whether one of `options` follows `offset` characters from here.

        White space before it does not count. Reads nothing. Unfinished if too little follows.
        """
        longest = max(map(len, options))
        while True:
            while self.text[self.pos + offset : self.pos + offset + 1] in _SPACES:
                offset += 1
            rest = self.text[self.pos + offset : self.pos + offset + longest]
            if any(rest.startswith(o) for o in options):
                return True
            if not any(o.startswith(rest) for o in options):
                return False
            if self.closed:
                raise Unfinished
            yield
