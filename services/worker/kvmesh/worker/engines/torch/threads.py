"""Runs a function in a thread and waits for its end even if cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(threads: Executor, function: Callable[..., T], *arguments: object) -> T:
    """Run `function` in a thread; if cancelled, wait for its end before raising CancelledError.

    The caller may reuse the memory that `function` works on as soon as this returns or raises.
    """
    future: Future[T] = threads.submit(function, *arguments)
    done = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise
