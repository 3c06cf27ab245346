"""Allocator of equal slots in one memory region, for blocks in transfer."""

import asyncio
import heapq
from collections.abc import Iterable


class Staging:
    """Slots 0 … `count` - 1, allocated in the order of the calls, regardless of their size."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._lock = asyncio.Lock()
        self._released = asyncio.Event()

    @property
    def free(self) -> int:
        return len(self._free)

    async def allocate(self, count: int) -> list[int]:
        """Wait for `count` free slots and allocate the lowest, which are mostly contiguous.

        Raises ValueError if `count` exceeds the number of all slots.
        """
        if count > self._count:
            raise ValueError(f"{count} blocks exceed the staging memory of {self._count}")
        async with self._lock:
            while len(self._free) < count:
                self._released.clear()
                await self._released.wait()
            return [heapq.heappop(self._free) for _ in range(count)]

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)
        self._released.set()
