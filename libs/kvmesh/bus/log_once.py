"""Messages that come again and again are logged once. Pure."""

MOST_TOLD = 64  # whoever sends more kinds of nonsense fills neither log nor memory


class LogOnce:
    """Remembers the first `most` things that were to be said."""

    def __init__(self, most: int = MOST_TOLD) -> None:
        self._most = most
        self._told: set[tuple[str, ...]] = set()

    def first(self, *thing: str) -> bool:
        """Whether this is to be said: it has not been yet, and there is room to remember it."""
        if thing in self._told or len(self._told) >= self._most:
            return False
        self._told.add(thing)
        return True
