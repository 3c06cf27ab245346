"""Placed prompts, which count as cached on their rank before any KV event.

They close the race between a decision and the engine's event, so that the siblings of a burst share
a rank. With a long TTL they replace the index if there are no KV events.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

from kvmesh.router.state.arrays import Floats
from kvmesh.router.state.prefix_tree import PrefixNode, PrefixTree

MAX_PROMPTS = 100_000


class _Placed(NamedTuple):
    slot: int
    end: PrefixNode
    until: float


class PredictedPrefixes:
    """Prompts by slot: until `ttl` seconds after they were computed.

    A prompt of which nothing is heard is dropped `patience` seconds after its placement. Beyond
    MAX_PROMPTS the oldest are dropped.
    """

    def __init__(self, ttl: float, patience: float) -> None:
        self._ttl = ttl
        self._patience = patience
        self._tree = PrefixTree()
        self._running: OrderedDict[str, _Placed] = OrderedDict()
        self._computed: deque[_Placed] = deque()

    def __len__(self) -> int:
        return len(self._running) + len(self._computed)

    def add(self, request: str, slot: int, sequence_hashes: bytes, now: float) -> None:
        """Add the prompt of a placed request; a request that is placed anew leaves its old rank."""
        if self._ttl <= 0 or not sequence_hashes:
            return
        earlier = self._running.pop(request, None)
        if earlier is not None:
            self._drop(earlier)
        end, _ = self._tree.add(slot, sequence_hashes)
        self._running[request] = _Placed(slot, end, now + self._patience)
        if len(self) > MAX_PROMPTS:
            self._drop(
                self._computed.popleft() if self._computed else self._running.popitem(last=False)[1]
            )

    def computed(self, request: str, now: float) -> None:
        """The request has its first token, or has ended; unknown ones change nothing."""
        placed = self._running.pop(request, None)
        if placed is not None:
            self._computed.append(placed._replace(until=now + self._ttl))

    def lost(self, request: str) -> None:
        """The request ended without a first token, or will not have one in time."""
        placed = self._running.pop(request, None)
        if placed is not None:
            self._drop(placed)

    def depths(self, sequence_hashes: bytes, size: int) -> Floats | None:
        """Expected leading blocks of a prompt per slot; None if nothing is predicted."""
        return self._tree.depths(sequence_hashes, size) if len(self) else None

    def expire(self, now: float) -> None:
        while self._computed and self._computed[0].until <= now:
            self._drop(self._computed.popleft())
        while self._running and next(iter(self._running.values())).until <= now:
            self._drop(self._running.popitem(last=False)[1])

    def forget(self, slots: list[int]) -> None:
        """Drop the prompts of `slots`, whose worker is gone."""
        gone = set(slots)
        running = self._running.items()
        for request in [request for request, placed in running if placed.slot in gone]:
            self._drop(self._running.pop(request))
        remaining = deque(placed for placed in self._computed if placed.slot not in gone)
        for placed in self._computed:
            if placed.slot in gone:
                self._drop(placed)
        self._computed = remaining

    def _drop(self, placed: _Placed) -> None:
        self._tree.drop(placed.end, placed.slot)
