"""The first connection to NATS: retries, their end, and the reason of a failure."""

import asyncio
import logging

from nats.errors import UnexpectedEOF

from kvmesh.bus.errors import URL_SETTING, cause
from kvmesh.settings.redaction import redacted

log = logging.getLogger(__name__)
BROKEN = (OSError, UnexpectedEOF)  # a server that stops, or has not restarted yet
REFUSED = "authorization violation"
WARN_S = 1.0
CREDENTIALS = "set nats.user and nats.password, nats.token, nats.nkey_seed or nats.credentials"
CANCEL_S = 0.2
FIRST = asyncio.FIRST_COMPLETED


class FirstConnection:
    """Watches the attempts to reach a server at `url`: at most `attempts`, None for no limit."""

    def __init__(self, url: str, attempts: int | None) -> None:
        self._url = redacted(url)
        self._left = attempts
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: Exception | None = None
        self._refused = False
        self._over = False

    @property
    def retried(self) -> bool:
        """True if an attempt has failed."""
        return self._last is not None

    def failed(self, error: Exception) -> bool:
        """Record a failed attempt; returns whether it ends the retries."""
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
                    text = "no NATS server at %s yet, retrying: %s (%s)"
                    log.warning(text, self._url, reason, URL_SETTING)
                    done, _ = await asyncio.wait(either, return_when=FIRST)
                    await done.pop()
                    log.info("reached NATS at %s", self._url)
                else:
                    await done.pop()
        finally:
            self._over = True
            if not self._ended.cancel():
                self._ended.exception()  # otherwise asyncio reports it as never retrieved
            await _cancel(attempt)

    def reason(self, error: Exception, credentials: str) -> Exception:
        """The reason of the failure; `credentials` names the settings that a server may reject."""
        if not self._refused:
            return self._last or error
        if not credentials:
            return PermissionError(f"it requires credentials: {CREDENTIALS}")
        return PermissionError(f"it rejects {credentials}")


async def _cancel(task: "asyncio.Task[None]") -> None:
    """Cancel until the task ends: `wait_for`, which nats-py uses, may lose one cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_S)
