"""Blocks that ranks held and removed: when, and why. It tells why a prompt is not cached. Pure."""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from kvmesh.bus.messages import Removal

MAX_RUNS = 32


class Cause(NamedTuple):
    """The removal of blocks by one event; `time` is in Unix seconds."""

    worker: str
    tier: int
    time: float
    reason: str
    request: str | None = None


class RemovedBlocks:
    """The causes of the latest removals, for `limit` blocks at most, by sequence hash.

    The blocks are in two generations; the older one is dropped whole when the younger is full, so
    that a removal costs one entry. A block may be held again, by the same rank or another one.
    `since` is the time from which on all removals are known; `clock` returns Unix seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.clock = clock
        self._limit = limit
        self._young: dict[int, Cause] = {}
        self._old: dict[int, Cause] = {}
        self.since = clock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def enabled(self) -> bool:
        return self._limit > 0

    def add(self, sequence_hashes: bytes, cause: Cause) -> None:
        """Record the removal of blocks, by packed sequence hashes."""
        if not self._limit:
            return
        self.since = min(self.since, cause.time) if not self._old else self.since
        young = self._young
        for block in memoryview(sequence_hashes).cast("Q"):
            young[block] = cause
        if 2 * len(young) >= self._limit:
            if self._old:
                self.since = max(cause.time for cause in self._old.values())
            self._old, self._young = young, {}

    def events_lost(self) -> None:
        """Removals before now may be missing."""
        self.since = max(self.since, self.clock())

    def find(self, prompt: bytes, first: int) -> list[Removal]:
        """The removals of the blocks of a prompt from index `first` on, in runs of equal causes.

        `prompt` is its packed sequence hashes. The runs end at the first block that no rank has
        held, and are MAX_RUNS at most.
        """
        hashes = memoryview(prompt).cast("Q")
        if first >= len(hashes) or self._cause(hashes[first]) is None:
            return []
        end = bisect_left(range(first, len(hashes)), True, key=lambda i: self._lacks(hashes[i]))
        return self._runs(hashes, first, first + end)

    def _runs(self, hashes: memoryview, first: int, end: int) -> list[Removal]:
        runs: list[Removal] = []
        at, cause = first, self._cause(hashes[first])
        for index in range(first + 1, end + 1):
            following = self._cause(hashes[index]) if index < end else None
            if cause is not None and following is not None and _alike(cause, following):
                cause = cause if following.time <= cause.time else following
                continue
            if cause is not None:
                runs.append(_run(at, index - at, cause))
                if len(runs) == MAX_RUNS:
                    break
            at, cause = index, following
        return runs

    def _cause(self, block: int) -> Cause | None:
        return self._young.get(block) or self._old.get(block)

    def _lacks(self, block: int) -> bool:
        return block not in self._young and block not in self._old


def _run(first: int, blocks: int, cause: Cause) -> Removal:
    return Removal(first, blocks, cause.worker, cause.tier, cause.time, cause.reason, cause.request)


def _alike(one: Cause, other: Cause) -> bool:
    """True if two causes differ in time only."""
    if one is other:
        return True
    same = (one.worker, one.tier, one.reason) == (other.worker, other.tier, other.reason)
    return same and one.request == other.request
