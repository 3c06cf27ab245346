"""The chunks of a stream: those missing, those rare, those near the head of the order."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvmesh.weights.stream.options import FetchOptions
from kvmesh.weights.stream.source import Bits, SourceState

_ABSENT = np.float32(np.inf)


def draws(name: str, count: int) -> NDArray[np.uint64]:
    """A number per chunk, which all that know the name compute alike (SplitMix64)."""
    start = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(start)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class ChunkBoard:
    """Chunks that are missing, and those of them that nobody was asked for.

    `holders` counts the partial sources that have a chunk or fetch it; `completes` the complete
    ones. `rivals` counts the other targets whose draw for a chunk is below the own one: that with
    the least takes the chunk from a complete source first. Decisions take time by the window, not
    by the number of chunks.
    """

    def __init__(self, sizes: Sequence[int], options: FetchOptions, name: str) -> None:
        if any(size <= 0 for size in sizes):
            raise ValueError("a chunk without bytes")
        self.sizes = list(sizes)
        self.count = self.missing = self.unasked = len(self.sizes)
        self.typical = max(self.sizes, default=1)
        self.first = 0
        self.completes = 0
        self.targets = 0  # others that fetch the same chunks
        self._options = options
        self._missing: Bits = np.ones(self.count, np.uint8)
        self._unasked: Bits = np.ones(self.count, np.uint8)
        self._holders: NDArray[np.int16] = np.zeros(self.count, np.int16)
        self._rivals: NDArray[np.int16] = np.zeros(self.count, np.int16)
        self._draws = draws(name, self.count)
        self._order = (self._draws / 2.0**64).astype(np.float32)
        self._places: NDArray[np.float32] = np.arange(options.window, dtype=np.float32)
        self._since_head = 0  # arrivals since the first missing chunk became that

    def check(self, chunk: int) -> None:
        if not 0 <= chunk < self.count:
            raise ValueError(f"chunk {chunk} of {self.count}")

    def settle(self, chunk: int) -> bool:
        """The chunk is there; False: it was before."""
        if not self._missing[chunk]:
            return False
        self._missing[chunk] = 0
        self.close(chunk)
        self.missing -= 1
        self._since_head += 1
        if chunk == self.first:
            self._since_head = 0
            first = chunk + 1
            while first < self.count and not self._missing[first]:
                first += 1
            self.first = first
        return True

    def close(self, chunk: int) -> None:
        """A source was asked for the chunk."""
        self.unasked -= int(self._unasked[chunk])
        self._unasked[chunk] = 0

    def reopen(self, chunk: int) -> None:
        """No source is asked for the chunk any more."""
        if self._missing[chunk] and not self._unasked[chunk]:
            self._unasked[chunk] = 1
            self.unasked += 1

    def gains(self, has: Bits, before: Bits) -> bool:
        """True if the source has gained a chunk that is missing here."""
        return bool((has & ~before & self._missing).any())

    def recount(self, before: Bits, after: Bits | None) -> None:
        """A source's chunks have changed; None: it is gone."""
        self._holders -= before
        if after is not None:
            self._holders += after

    def compete(self, name: str, change: int) -> None:
        """Another target has come (`change` 1), or is gone or has all (-1)."""
        self.targets += change
        self._rivals += np.int16(change) * (draws(name, self.count) < self._draws)

    def choose(self, source: SourceState, skip: int, shared: bool) -> int | None:
        """The chunk of the window to ask the source for; None: none.

        A slow source leaves out the first `skip` ones, which others will have brought before it
        would, except those that only it has. While the targets share chunks (`shared`), a complete
        source is asked only for what it has not sent and no partial source has or fetches, or if
        the head has been held up for long.
        """
        low = self.first
        high = min(low + self._options.window, self.count)
        mask = self._unasked[low:high]
        if source.has is not None:
            mask = mask & source.has[low:high]
        if not mask.any():
            return None
        places = self._places[: high - low]
        holders = self._holders[low:high]
        options = self._options
        if skip:
            others = holders + self.completes
            mask = mask & ((places >= skip) | (others <= (not source.local)))
        if mask[0]:
            longest = options.window // 2 if source.has is None else 2 * options.head
            fresh = not holders[0] and not source.sent_before(low)
            if self._since_head >= (2 * options.head if fresh else longest):
                return low
        if source.local:
            scores = places
        elif source.has is None:
            if shared and source.has_sent is not None:
                holders = holders + source.has_sent[low:high]
            if shared:
                mask = mask & (holders == 0)
            rank = holders * np.float32(64) + self._rivals[low:high]
            scores = rank * (2 * self._places.size) + self._order[low:high] * (places + 8)
        else:
            scores = holders * (places + 8)
            scores[: options.head] -= 1e6
        scores = np.where(mask, scores, _ABSENT)
        best = int(scores.argmin())
        return low + best if mask[best] else None
