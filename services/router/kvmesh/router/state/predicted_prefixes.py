"""Recently placed prompts, which count as cached on their rank before any KV event.

With a short TTL they close the race between a decision and the engine's event, so that the
siblings of a burst share a rank. With a long TTL they replace the index if there are no KV events.
"""

from collections import deque

from kvmesh.router.state.arrays import Floats
from kvmesh.router.state.prefix_tree import PrefixNode, PrefixTree

MAX_PROMPTS = 100_000


class PredictedPrefixes:
    """Prompts by slot, each for `ttl` seconds; beyond MAX_PROMPTS the oldest are dropped."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._tree = PrefixTree()
        self._entries: deque[tuple[float, int, PrefixNode]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, slot: int, sequence_hashes: bytes, now: float) -> None:
        if self._ttl <= 0 or not sequence_hashes:
            return
        end, _ = self._tree.add(slot, sequence_hashes)
        self._entries.append((now + self._ttl, slot, end))
        if len(self._entries) > MAX_PROMPTS:
            self._drop_oldest()

    def depths(self, sequence_hashes: bytes, size: int) -> Floats | None:
        """Expected leading blocks of a prompt per slot; None if nothing is predicted."""
        return self._tree.depths(sequence_hashes, size) if self._entries else None

    def expire(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now:
            self._drop_oldest()

    def forget(self, slots: list[int]) -> None:
        """Drop the prompts of `slots`, whose worker is gone."""
        gone = set(slots)
        remaining = deque(entry for entry in self._entries if entry[1] not in gone)
        for _, slot, end in self._entries:
            if slot in gone:
                self._tree.drop(end, slot)
        self._entries = remaining

    def _drop_oldest(self) -> None:
        _, slot, end = self._entries.popleft()
        self._tree.drop(end, slot)
