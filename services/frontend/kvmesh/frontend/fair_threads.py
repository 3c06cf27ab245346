"""A few threads for slow pure work, taken in turns by those whose requests need it."""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvmesh.runtime.fair_slots import FairSlots

T = TypeVar("T")
THREADS = 2
Steps = Generator[None, None, T]


class FairThreads:
    """Runs generators step by step; between two steps those of other owners have their turns.

    At most one step of each request waits here, so requests bound the queue.
    """

    def __init__(self, count: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="prepare")
        self._slots = FairSlots(count)

    async def call(self, owner: str, function: Callable[[], T]) -> T:
        """Call `function` when it is the owner's turn; returns its result."""
        await self._slots.acquire(owner)
        work = asyncio.get_running_loop().run_in_executor(self._pool, function)
        work.add_done_callback(self._done)
        return await work

    async def finish(self, owner: str, steps: "Steps[T]", at_once: bool) -> T:
        """Run `steps` to their result; with `at_once` they begin here, up to the first yield."""
        if at_once:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        while not (left := await self.call(owner, lambda: _step(steps))):
            pass
        return left[0]

    def _done(self, work: "asyncio.Future[T]") -> None:
        if not work.cancelled():
            work.exception()  # whoever waited for it may be gone
        self._slots.release()


def _step(steps: "Steps[T]") -> tuple[T] | None:
    """The result once there is one."""
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None
