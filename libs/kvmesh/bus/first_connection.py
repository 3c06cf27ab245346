"""The first connection to NATS: for how long it is tried, and what is said of it meanwhile."""

import asyncio
import logging

from nats.errors import UnexpectedEOF

from kvmesh.bus.errors import cause

log = logging.getLogger(__name__)
BROKEN = (OSError, UnexpectedEOF)  # what a server that goes away, or is not back yet, looks like
REFUSED = "authorization violation"
WARN_S = 1.0
FIRST = asyncio.FIRST_COMPLETED


class FirstConnection:
    """Watches the attempts to reach a server, of which there are at most so many, or no end."""

    def __init__(self, attempts: int | None) -> None:
        self._left = attempts
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: Exception | None = None
        self._refused = False
        self._over = False

    def failed(self, error: Exception) -> bool:
        """One attempt did; returns whether it was the last. Once it is over, none matters."""
        if self._over:
            return False
        if self._ended.done():
            return True
        self._last = error
        self._refused = REFUSED in str(error).lower()
        if self._left is not None:
            self._left -= 1
        decisive = self._refused or self._left == 0
        if decisive:
            self._ended.set_exception(error)
        return decisive

    async def result(self, attempt: "asyncio.Task[None]", timeout: float | None) -> None:
        """Return when `attempt` does; raises its error, the decisive one, or TimeoutError."""
        try:
            async with asyncio.timeout(timeout):
                either: set[asyncio.Future[None]] = {attempt, self._ended}
                patience = WARN_S if timeout is None else None
                done, _ = await asyncio.wait(either, timeout=patience, return_when=FIRST)
                if not done:
                    reason = cause(self._last or TimeoutError())
                    log.warning("no NATS server yet, trying on: %s", reason)
                    done, _ = await asyncio.wait(either, return_when=FIRST)
                await done.pop()
        finally:
            self._over = True
            if not self._ended.cancel():
                self._ended.exception()  # else it would be reported as never looked at
            await _cancel(attempt)

    def reason(self, error: Exception, credentials: str) -> Exception:
        """The failure in words; `credentials` are the settings that a server may refuse."""
        if not self._refused:
            return self._last or error
        if not credentials:
            return PermissionError("it asks for a user and password, a token or credentials")
        return PermissionError(f"it refuses {credentials}")


async def _cancel(task: "asyncio.Task[None]") -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
