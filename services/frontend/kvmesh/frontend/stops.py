"""Stop strings: cut the text where one begins, and hold back what may become one."""


class StopMatcher:
    """Scans text as it comes. After a match `matched` is set and nothing more passes."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown now; text that could be the start of a stop string is held."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        text = self._held + text
        at, stop = self._find(text)
        if stop is not None:
            self._held = ""
            self.matched = stop
            return text[:at]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return "" if self.matched is not None else held

    def _find(self, text: str) -> tuple[int, str | None]:
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=(0, None), key=lambda pair: pair[0])

    def _partial(self, text: str) -> int:
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
