"""Stop strings: cut the text where one begins, and hold back what may become one."""

from functools import lru_cache


class StopMatcher:
    """Scans text as it comes. After a match `matched` is set and nothing more passes.

    It works as Knuth, Morris and Pratt do: what a character costs does not depend on how long the
    stop strings are, nor on how much of one has been seen.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._borders = [borders(stop) for stop in self._stops]
        self._seen = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown now; text that could be the start of a stop string is held."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        found = [
            (at, place) for place in range(len(self._stops)) if (at := self._scan(place, text))
        ]
        text = self._held + text
        if found:
            at, place = min((at - len(self._stops[place]), place) for at, place in found)
            shown = text[: len(self._held) + at]
            self._held = ""
            self.matched = self._stops[place]
            return shown
        keep = max(self._seen)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _scan(self, place: int, text: str) -> int:
        """Where in `text` the stop string number `place` first ends; 0 if it does not."""
        stop, back, seen = self._stops[place], self._borders[place], self._seen[place]
        for at, char in enumerate(text, 1):
            while seen and stop[seen] != char:
                seen = back[seen - 1]
            seen += stop[seen] == char
            if seen == len(stop):
                return at
        self._seen[place] = seen
        return 0

    def finish(self) -> str:
        """The held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return "" if self.matched is not None else held


@lru_cache(maxsize=512)
def borders(stop: str) -> list[int]:
    """For each of its beginnings, how much of its end is a beginning of it, too."""
    found, size = [0], 0
    for char in stop[1:]:
        while size and stop[size] != char:
            size = found[size - 1]
        size += stop[size] == char
        found.append(size)
    return found
