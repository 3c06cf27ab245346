"""A few threads for slow pure work, taken in turns by those whose requests need it."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
THREADS = 2
Steps = Generator[None, None, T]


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


class Threads:
    """Runs generators step by step; between two steps those of other owners have their turns.

    At most one step of each request waits here, so requests bound the queue.
    """

    def __init__(self, count: int = THREADS) -> None:
        self._free = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="prepare")
        self._turns: FairQueue[asyncio.Future[None]] = FairQueue()

    async def call(self, owner: str, function: Callable[[], T]) -> T:
        """What `function` returns, which is called when it is the owner's turn."""
        await self._turn(owner)
        work = asyncio.get_running_loop().run_in_executor(self._pool, function)
        work.add_done_callback(self._done)
        return await work

    async def finish(self, owner: str, steps: "Steps[T]", at_once: bool) -> T:
        """What `steps` return in the end; with `at_once` they begin here, up to the first yield."""
        if at_once:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        while not (left := await self.call(owner, lambda: _step(steps))):
            pass
        return left[0]

    async def _turn(self, owner: str) -> None:
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.add(owner, mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._pass_on()
            raise

    def _done(self, work: "asyncio.Future[T]") -> None:
        if not work.cancelled():
            work.exception()  # whoever waited for it may be gone
        self._pass_on()

    def _pass_on(self) -> None:
        while self._turns:
            following = self._turns.next()
            if not following.done():
                following.set_result(None)
                return
        self._free += 1


def _step(steps: "Steps[T]") -> tuple[T] | None:
    """The result once there is one."""
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None
