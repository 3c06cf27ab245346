"""Slots for slow work, and turns in the event loop, granted round-robin among owners."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue that serves owners round-robin, and each owner's items in order. Pure."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, owner: str, item: T) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def next(self) -> T:
        """Remove and return the next item; its owner then follows all other waiting owners."""
        owner, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[owner] = items
        return item


class FairSlots:
    """At most `count` slots are held at a time; callers bound the number of waiters."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiters: FairQueue[asyncio.Future[None]] = FairQueue()

    async def acquire(self, owner: str) -> None:
        """Wait for a slot; the caller must `release` it."""
        if self._free:
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(owner, granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Return a slot, or pass it to the next waiter."""
        while self._waiters:
            following = self._waiters.next()
            if not following.done():
                following.set_result(None)
                return
        self._free += 1

    @asynccontextmanager
    async def held(self, owner: str) -> AsyncIterator[None]:
        """Hold a slot within the context."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release()


class FairTurns:
    """Lets at most `count` callers go on in each pass of the event loop, owners in turn.

    Without it, the loop would work on hundreds of requests that one owner sent at one instant
    before it looked at another's. Callers bound the number of waiters.
    """

    def __init__(self, count: int) -> None:
        self._count = self._left = count
        self._waiters: FairQueue[asyncio.Future[None]] = FairQueue()
        self._planned = False

    async def take(self, owner: str) -> None:
        """Return at once if there is room in this pass, else in a later one."""
        self._plan()
        if self._left and not self._waiters:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(owner, turn)
        await turn

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._planned, self._left = False, self._count
        while self._left and self._waiters:
            turn = self._waiters.next()
            if not turn.done():  # else its caller has gone
                turn.set_result(None)
                self._left -= 1
        if self._waiters:
            self._plan()
