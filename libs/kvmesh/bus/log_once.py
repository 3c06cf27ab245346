"""Limits repeated log messages to one each. Pure."""

MAX_KEYS = 64  # bounds log and memory against a sender of ever-different nonsense


class LogOnce:
    """Remembers the first `limit` keys."""

    def __init__(self, limit: int = MAX_KEYS) -> None:
        self._limit = limit
        self._logged: set[tuple[str, ...]] = set()

    def first(self, *key: str) -> bool:
        """True for a new key while fewer than `limit` are remembered."""
        if key in self._logged or len(self._logged) >= self._limit:
            return False
        self._logged.add(key)
        return True
