"""Stop strings: cut the text at the first one, and hold back text that may become one."""

from functools import lru_cache


class StopMatcher:
    """Scans text as it arrives; after a match `matched` is set and no more text passes.

    It is the algorithm of Knuth, Morris and Pratt: the cost per character depends neither on the
    length of the stop strings nor on how much of one has been seen.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._borders = [borders(stop) for stop in self._stops]
        self._seen = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text to show now; text that could begin a stop string is held back."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        found = [
            (end, index) for index in range(len(self._stops)) if (end := self._scan(index, text))
        ]
        text = self._held + text
        if found:
            start, index = min((end - len(self._stops[index]), index) for end, index in found)
            shown = text[: len(self._held) + start]
            self._held = ""
            self.matched = self._stops[index]
            return shown
        held = max(self._seen)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _scan(self, index: int, text: str) -> int:
        """The offset in `text` at which stop string `index` first ends; 0 if it does not."""
        stop, back, seen = self._stops[index], self._borders[index], self._seen[index]
        for end, char in enumerate(text, 1):
            while seen and stop[seen] != char:
                seen = back[seen - 1]
            seen += stop[seen] == char
            if seen == len(stop):
                return end
        self._seen[index] = seen
        return 0

    def finish(self) -> str:
        """Return the text held back, which has not become a stop string; begin anew."""
        held, self._held = self._held, ""
        self._seen = [0] * len(self._stops)
        return "" if self.matched is not None else held


NO_STOPS = StopMatcher([])  # has no state


@lru_cache(maxsize=512)
def borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also a suffix of it."""
    found, size = [0], 0
    for char in stop[1:]:
        while size and stop[size] != char:
            size = found[size - 1]
        size += stop[size] == char
        found.append(size)
    return found
