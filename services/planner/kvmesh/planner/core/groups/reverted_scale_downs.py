"""Scale-downs that were reverted within ten minutes: the planner repeats none for half an hour."""

from math import inf

SOON_S = 600.0
REMEMBERED_S = 1800.0
SAME = 0.1  # change of the load that makes it another one


class RevertedScaleDowns:
    """The latest scale-down of a group, and the capacity that it turned out to need.

    Capacities are in workers of the fastest pool, loads in arrivals per second.
    """

    def __init__(self) -> None:
        self._removal = -inf, 0.0, 0.0
        self._needed = -inf, 0.0, 0.0

    def removed(self, capacity: float, level: float, now: float) -> None:
        """Workers are removed from a fleet of `capacity` at the load `level`."""
        self._removal = now, capacity, level

    def added(self, capacity: float, level: float, now: float) -> None:
        """Workers are added, so the fleet has `capacity`; a removal before may have been wrong."""
        removed_at, before, then = self._removal
        if now - removed_at <= SOON_S and level <= (1 + SAME) * then:
            self._needed = now, min(capacity, before), level
        self._removal = -inf, 0.0, 0.0

    def least(self, level: float, now: float) -> float:
        """The capacity below which the fleet is not to shrink at the load `level`."""
        since, capacity, then = self._needed
        return capacity if now - since <= REMEMBERED_S and level >= (1 - SAME) * then else 0.0
