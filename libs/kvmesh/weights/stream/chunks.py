"""The chunks of a stream: those missing, those rare, those near the head of the order."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.weights.stream.options import FetchOptions
from kvmesh.weights.stream.source import Bits, SourceState

_ABSENT = np.float32(np.inf)


class ChunkBoard:
    """Chunks that are missing, and those of them that nobody was asked for.

    `holders` counts the partial sources that have a chunk or fetch it; `completes` the complete
    ones. Decisions take time by the window, not by the number of chunks.
    """

    def __init__(self, sizes: Sequence[int], options: FetchOptions, key: int) -> None:
        if any(size <= 0 for size in sizes):
            raise ValueError("a chunk without bytes")
        self.sizes = list(sizes)
        self.count = self.missing = self.unasked = len(self.sizes)
        self.typical = max(self.sizes, default=1)
        self.first = 0
        self.completes = 0
        self._options = options
        self._missing: Bits = np.ones(self.count, np.uint8)
        self._unasked: Bits = np.ones(self.count, np.uint8)
        self._holders: NDArray[np.int16] = np.zeros(self.count, np.int16)
        draws = np.random.default_rng(key % 2**64).random(self.count, np.float32)
        self._draws: NDArray[np.float32] = np.maximum(draws, np.float32(1e-6))
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

    def choose(self, source: SourceState, skip: int, in_flight: int) -> int | None:
        """The chunk of the window to ask the source for; None: none.

        A slow source leaves out the first `skip` ones, which others will have brought before it
        would, except those that only it has. A complete source that others share is asked for what
        no partial source has or fetches; for other chunks only if less than two requests are
        `in_flight`, or if one has held up the head for long.
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
        if mask[0] and not skip and self._since_head >= 2 * self._options.head:
            return low
        if skip:
            others = holders + self.completes
            mask = mask & ((places >= skip) | (others <= (not source.local)))
        if source.local:
            scores = places
        elif source.has is None:
            if in_flight >= 2:
                mask = mask & (holders == 0)
            scores = holders * np.float32(1e6) + self._draws[low:high] * (places + 8)
        else:
            scores = holders * self._draws[low:high] * (places + 8)
            scores[: self._options.head] -= 1e6
        scores = np.where(mask, scores, _ABSENT)
        best = int(scores.argmin())
        return low + best if mask[best] else None
