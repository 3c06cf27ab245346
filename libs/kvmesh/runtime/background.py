"""Background tasks of one component, and work that must end before its caller does."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class BackgroundTasks:
    """Holds tasks so that they are not garbage-collected; logs their failures.

    `len()` counts the tasks that have not ended.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, work: Coroutine[Any, Any, T], name: str | None = None, awaited: bool = False
    ) -> "asyncio.Task[T]":
        """Run a coroutine as a task. `awaited`: the caller handles its failure, so none is logged.

        Must be called in a running event loop.
        """
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard if awaited else self._end)
        return task

    def cancel(self) -> None:
        """Cancel all tasks without waiting for them."""
        for task in self._tasks:
            task.cancel()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until the tasks present now have ended, at most `timeout` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        self.cancel()
        await self.wait()

    def _end(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task %s failed", task.get_name(), exc_info=error)


async def ended(work: "asyncio.Future[T]", on_cancel: Callable[[], object] = lambda: None) -> T:
    """The result of work, which has always ended when this does.

    The first cancellation calls `on_cancel`; it is raised after the end of the work.
    """
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            if not cancelled:
                cancelled = True
                on_cancel()
    if not cancelled:
        return work.result()
    if not work.cancelled():
        work.exception()  # so that it is not reported as one that nobody has seen
    raise asyncio.CancelledError
