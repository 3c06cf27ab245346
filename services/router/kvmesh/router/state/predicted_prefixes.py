"""Prompts that were sent somewhere lately: taken as cached there before any event says so.

With a short life it closes the race between a decision and the engine's event, so that the
siblings of a burst meet; with a long one it stands in for an index where there are no events.
"""

from collections import deque

from kvmesh.router.state.arrays import Floats
from kvmesh.router.state.prefix_tree import PrefixNode, PrefixTree

MOST = 100_000


class PredictedPrefixes:
    """Prompts by slot, each for `ttl` seconds; the oldest go first beyond MOST of them."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._tree = PrefixTree()
        self._held: deque[tuple[float, int, PrefixNode]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, slot: int, sequence: bytes, now: float) -> None:
        if self._ttl <= 0 or not sequence:
            return
        end, _ = self._tree.add(slot, sequence)
        self._held.append((now + self._ttl, slot, end))
        if len(self._held) > MOST:
            self._drop_oldest()

    def depths(self, sequence: bytes, size: int) -> Floats | None:
        """For each slot, how many leading blocks it should hold; None if nothing is predicted."""
        return self._tree.depths(sequence, size) if self._held else None

    def expire(self, now: float) -> None:
        while self._held and self._held[0][0] <= now:
            self._drop_oldest()

    def forget(self, slots: list[int]) -> None:
        """Drop what `slots` hold: their worker is gone."""
        gone = set(slots)
        kept = deque(entry for entry in self._held if entry[1] not in gone)
        for _, slot, end in self._held:
            if slot in gone:
                self._tree.drop(end, slot)
        self._held = kept

    def _drop_oldest(self) -> None:
        _, slot, end = self._held.popleft()
        self._tree.drop(end, slot)
