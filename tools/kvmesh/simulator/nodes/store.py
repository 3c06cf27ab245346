"""The simulated remote store: blocks of all nodes, the least recently used evicted first."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvmesh.retention.claims import RetentionWish


class StoredBlock(NamedTuple):
    """A block's size, the time of its last use, and the retention that is stored with it."""

    size: int
    used: float
    wishes: list[RetentionWish]


class SimulatedStore:
    """At most `capacity` bytes; a block expires `lease_s` after its last lookup."""

    def __init__(self, capacity: int, lease_s: float) -> None:
        self._capacity = capacity
        self._lease_s = lease_s
        self._blocks: OrderedDict[bytes, StoredBlock] = OrderedDict()
        self._used = 0

    def put(self, digest: bytes, size: int, wishes: list[RetentionWish], now: float) -> None:
        self.drop([digest])
        self._blocks[digest] = StoredBlock(size, now, wishes)
        self._used += size
        while self._used > self._capacity:
            self.drop([next(iter(self._blocks))])

    def find(self, digests: Sequence[bytes], now: float) -> int:
        """Number of leading blocks in the store; restarts their leases."""
        for count, digest in enumerate(digests):
            block = self.get(digest, now)
            if block is None:
                return count
            self._blocks[digest] = block._replace(used=now)
            self._blocks.move_to_end(digest)
        return len(digests)

    def get(self, digest: bytes, now: float) -> StoredBlock | None:
        block = self._blocks.get(digest)
        return block if block is not None and now - block.used <= self._lease_s else None

    def drop(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            block = self._blocks.pop(digest, None)
            self._used -= block.size if block is not None else 0
