"""Room for blocks on their way: places of one size in one region, taken and given back."""

import asyncio
import heapq
from collections.abc import Iterable


class Staging:
    """Places 0 … `count` - 1. Who asks first is served first, however much others want."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._turn = asyncio.Lock()
        self._given = asyncio.Event()

    @property
    def free(self) -> int:
        return len(self._free)

    async def take(self, count: int) -> list[int]:
        """Wait for as many places; the lowest, so that they mostly lie side by side.

        Raises ValueError if there never are as many.
        """
        if count > self._count:
            raise ValueError(f"{count} blocks do not fit into staging memory for {self._count}")
        async with self._turn:
            while len(self._free) < count:
                self._given.clear()
                await self._given.wait()
            return [heapq.heappop(self._free) for _ in range(count)]

    def give(self, places: Iterable[int]) -> None:
        for place in places:
            heapq.heappush(self._free, place)
        self._given.set()
