"""A few slots for slow work, taken in turns by those who need one."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items in the order in which they are due: owners by turns, each one's oldest first. Pure."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, owner: str, item: T) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def next(self) -> T:
        """Whoever has had a turn waits for all others that wait."""
        owner, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[owner] = items
        return item


class FairSlots:
    """At most `count` have one at a time; callers bound how many wait."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._turns: FairQueue[asyncio.Future[None]] = FairQueue()

    async def take(self, owner: str) -> None:
        """Wait for a slot; whoever has one must `free` it."""
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.add(owner, mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.free()
            raise

    def free(self) -> None:
        """Pass a slot on."""
        while self._turns:
            following = self._turns.next()
            if not following.done():
                following.set_result(None)
                return
        self._free += 1

    @asynccontextmanager
    async def held(self, owner: str) -> AsyncIterator[None]:
        """Have a slot."""
        await self.take(owner)
        try:
            yield
        finally:
            self.free()
