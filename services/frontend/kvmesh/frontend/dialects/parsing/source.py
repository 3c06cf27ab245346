"""Text source of the parsers, which are generators that yield when they need more text.

`OutputSource` holds the unread text and, while an attempt may still fail, the text read since the
attempt began.
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
    """The text does not match the grammar."""


class Unfinished(MalformedOutput):
    """The output ended before the construct was complete."""


class MarkerSet:
    """Markers to search for; at one position the longest wins."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = sorted({m for m in markers if m}, key=len, reverse=True)
        self.longest = max(map(len, self.markers), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")
        heads = "".join(re.escape(m[0]) for m in self.markers)
        self._head = re.compile(f"[{heads}]" if heads else r"(?!)")

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def partial_start(self, text: str, start: int) -> int:
        """Offset of a marker's prefix at the end of `text`; the text's length if there is none."""
        pos = max(start, len(text) - self.longest + 1)
        while match := self._head.search(text, pos):
            pos = match.start()
            rest = text[pos:]
            if any(m.startswith(rest) for m in self.markers):
                return pos
            pos += 1
        return len(text)

    def none_begins_in(self, text: str) -> bool:
        return self._head.search(text) is None

    def may_grow(self, text: str, start: int) -> bool:
        """True if `text` from `start` on is the prefix of a longer marker."""
        rest = text[start : start + self.longest]
        return any(len(m) > len(rest) and m.startswith(rest) for m in self.markers)


@cache
def marker_set(markers: tuple[str, ...]) -> MarkerSet:
    """A shared set of these markers; sets hold no state."""
    return MarkerSet(markers)


class OutputSource:
    """The unread text of one output; `closed` at its end."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False
        self._marked: list[str] | None = None

    def feed(self, text: str) -> None:
        if self._marked is not None:
            self._marked.append(self.text[: self.pos])
        self.text = self.text[self.pos :] + text
        self.pos = 0

    @property
    def exhausted(self) -> bool:
        """All text is read and no attempt can rewind."""
        return self.pos == len(self.text) and self._marked is None

    # --- attempts ---

    def mark(self, back: int = 0) -> None:
        """Set the position for `rewind` to `back` characters before this one."""
        self._marked = []
        self.text = self.text[self.pos - back :]
        self.pos = back

    def rewind(self) -> None:
        if self._marked is not None:
            self.text = "".join(self._marked) + self.text
            self.pos = 0
            self._marked = None

    def release(self) -> None:
        self._marked = None

    # --- reading ---

    def peek(self) -> Steps[str]:
        """The next character, left unread; "" at the end of the output."""
        while self.pos >= len(self.text):
            if self.closed:
                return ""
            yield
        return self.text[self.pos]

    def skip_space(self) -> Steps[str]:
        """Skip white space; return the next character, left unread."""
        while True:
            char = yield from self.peek()
            if not char or char not in SPACE:
                return char
            self.pos += 1

    def literal(self, *options: str) -> Steps[str | None]:
        """Read the longest of `options` that is here; None if there is none."""
        end = self.pos + max(map(len, options), default=0)
        while True:
            rest = self.text[self.pos : end]
            unsettled = [o for o in options if len(o) > len(rest) and o.startswith(rest)]
            if not unsettled or self.closed:
                break
            yield
        found = [o for o in options if o and rest.startswith(o)]
        if not found:
            return None
        best = max(found, key=len)
        self.pos += len(best)
        return best

    def follow(self, text: str) -> Steps[bool]:
        """Skip `text` and white space before it, if they are here."""
        offset = 0
        while True:
            while self.text[self.pos + offset : self.pos + offset + 1] in _SPACES:
                offset += 1
            rest = self.text[self.pos + offset : self.pos + offset + len(text)]
            if rest == text:
                self.pos += offset + len(text)
                return True
            if self.closed or (rest and not text.startswith(rest)):
                return False
            yield

    def match(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Read the whole match of `pattern` here, perhaps "".

        Raises MalformedOutput beyond `limit` characters.
        """
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

    def until(self, markers: MarkerSet) -> Steps[tuple[str, str | None]]:
        """Read text up to a marker: (text, marker), or (text, None) if more text may follow."""
        while True:
            found = markers.find(self.text, self.pos)
            if found and (self.closed or not markers.may_grow(self.text, found.start())):
                text, self.pos = self.text[self.pos : found.start()], found.end()
                return text, found[0]
            end = found.start() if found else len(self.text)
            if not self.closed and not found:
                end = markers.partial_start(self.text, self.pos)
            if end > self.pos:
                text, self.pos = self.text[self.pos : end], end
                return text, None
            if self.closed:
                raise Unfinished
            yield

    def follows(self, options: tuple[str, ...], offset: int = 0) -> Steps[bool]:
        """True if one of `options` follows `offset` characters from here; reads nothing.

        Ignores white space before it. Raises Unfinished if the output ends too early.
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

    def ends_or_follows(self, options: tuple[str, ...], offset: int = 0) -> Steps[bool]:
        """True if one of `options` follows `offset` characters from here, or the end of the output.

        Ignores white space before it; reads nothing.
        """
        longest = max(map(len, options), default=1)
        while True:
            while self.text[self.pos + offset : self.pos + offset + 1] in _SPACES:
                offset += 1
            rest = self.text[self.pos + offset : self.pos + offset + longest]
            if any(rest.startswith(o) for o in options):
                return True
            if self.closed:
                return self.pos + offset == len(self.text)
            if rest and not any(o.startswith(rest) for o in options):
                return False
            yield
