"""Work in a thread on memory that must not be touched before it has ended."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")


async def completed(threads: Executor, function: Callable[..., T], *arguments: object) -> T:
    """Run in a thread and, even if cancelled, wait until it has ended."""
    running: Future[T] = threads.submit(function, *arguments)
    ending = asyncio.wrap_future(running)
    try:
        return await asyncio.shield(ending)
    except asyncio.CancelledError:
        await asyncio.wait([ending])
        raise
