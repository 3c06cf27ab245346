"""Answers that the bus gives only when asked: asked while a page shows them, once for all pages."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvmesh.bus.errors import BusError, NotPermitted, cause

log = logging.getLogger(__name__)
T = TypeVar("T")
DEADLINE_S = 8.0
SHARE = 0.2  # of the time may pass in asking


class Polled(Generic[T]):
    """The latest result of `ask`; `fault` says why there is no newer one, else it is empty.

    `ask` may raise BusError. It runs again `every_s` seconds later at the earliest,
    and later if it takes long.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], every_s: float) -> None:
        self._ask = ask
        self._every_s = every_s
        self._clock = asyncio.get_running_loop().time
        self._due = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.value: T | None = None
        self.fault = ""

    def poll(self) -> T | None:
        """The latest result; asks again if it is time to. Call it at each refresh of a page."""
        if self._task is None and self._clock() >= self._due:
            self._task = asyncio.create_task(self._run())
        return self.value

    async def _run(self) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(DEADLINE_S):
                self.value = await self._ask()
            self.fault = ""
        except (BusError, TimeoutError) as error:
            self.fault = fault_text(error)
        except Exception as error:
            self.fault = f"It failed: {type(error).__name__}. The log has the cause."
            log.exception("an answer for a page could not be had")
        finally:
            now = self._clock()
            self._due = now + max(self._every_s, (now - began) / SHARE)
            self._task = None


def fault_text(error: BaseException) -> str:
    """The reason of a failure, with the permission that is missing."""
    if isinstance(error, NotPermitted):
        return (
            f"The credentials of this dashboard do not permit publishing on {error.subject}."
            " Those of the user dashboard do (kvmesh secure)."
        )
    return f"No answer: {cause(error)}."
