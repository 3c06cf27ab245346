"""A small thread pool for slow pure work, shared fairly among owners of requests."""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvmesh.runtime.fair_slots import FairSlots

T = TypeVar("T")
THREADS = 2
Steps = Generator[None, None, T]


class FairThreads:
    """Runs functions, and generators step by step so that other owners' work can interleave.

    At most one step of each request waits here, so the number of requests bounds the queue.
    """

    def __init__(self, count: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="prepare")
        self._slots = FairSlots(count)

    async def call(self, owner: str, function: Callable[[], T]) -> T:
        """Call `function` in a thread when it is the owner's turn."""
        await self._slots.acquire(owner)
        work = asyncio.get_running_loop().run_in_executor(self._pool, function)
        work.add_done_callback(self._done)
        return await work

    async def run_steps(self, owner: str, steps: "Steps[T]", at_once: bool) -> T:
        """Run `steps` to their result; with `at_once` the first step runs in the event loop."""
        if at_once:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        while not (result := await self.call(owner, lambda: _step(steps))):
            pass
        return result[0]

    def _done(self, work: "asyncio.Future[T]") -> None:
        if not work.cancelled():
            work.exception()  # retrieved here because the waiter may be cancelled
        self._slots.release()


def _step(steps: "Steps[T]") -> tuple[T] | None:
    """Run one step; the result in a tuple once the generator has ended."""
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None
