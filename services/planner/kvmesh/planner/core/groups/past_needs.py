"""The capacities that a group has needed lately: they keep its workers."""

from collections import deque
from math import inf

MOST_NEEDS = 1024


class PastNeeds:
    """Needed capacities with their times, oldest first."""

    def __init__(self) -> None:
        self._needs: deque[tuple[float, float]] = deque(maxlen=MOST_NEEDS)

    def add(self, capacity: float, now: float, hold_s: float) -> None:
        """Add a need, and forget those older than `hold_s`."""
        self._needs.append((now, capacity))
        while now - self._needs[0][0] > hold_s:
            self._needs.popleft()

    def most(self, since: float = -inf) -> float:
        """The largest need from `since` on, or the latest one if that is older."""
        return max(
            (capacity for at, capacity in self._needs if at >= since), default=self._needs[-1][1]
        )

    def known_since(self, since: float) -> bool:
        """True if needs have been known from `since` on."""
        return bool(self._needs) and self._needs[0][0] <= since
