"""The first connection to NATS: retries, their end, and the reason of a failure."""

import asyncio
import logging

from nats.errors import UnexpectedEOF

from kvmesh.bus.connection.api_errors import LIMITS, with_limit
from kvmesh.bus.connection.direct_client import LoginRefused
from kvmesh.bus.connection.login import Login
from kvmesh.bus.errors import URL_SETTING, cause
from kvmesh.settings.redaction import redacted

log = logging.getLogger(__name__)
BROKEN = (OSError, UnexpectedEOF)  # a server that stops, or has not restarted yet
REFUSED = "authorization violation"
WARN_S = 1.0
CREDENTIALS = "set nats.user and nats.password, nats.token, nats.nkey_seed or nats.credentials"
OTHER = f"map it with verify_and_map, or {CREDENTIALS}"
CANCEL_S = 0.2
FIRST = asyncio.FIRST_COMPLETED


class FirstConnection:
    """Watches the attempts to reach a server at `url`: at most `attempts`, None for no limit."""

    def __init__(self, url: str, attempts: int | None) -> None:
        self._url = redacted(url)
        self._left = attempts
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: Exception | None = None
        self._refusal: LoginRefused | None = None
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
        self._refusal = error if isinstance(error, LoginRefused) else None
        if self._left is not None:
            self._left -= 1
        refused = self._refusal is not None and _text(self._refusal).lower() not in LIMITS
        decisive = refused or self._left == 0
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
                    log.warning("%s", self._waits())
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

    def _waits(self) -> str:
        if self._refusal is not None:
            refusal = with_limit(_text(self._refusal))
            return f"NATS at {self._url} is not usable yet, retrying: {refusal}"
        reason = cause(self._last or TimeoutError())
        return f"no NATS server at {self._url} yet, retrying: {reason} ({URL_SETTING})"

    def reason(self, error: Exception, login: Login) -> Exception:
        """The reason of the failure; `login` names the settings that a server may reject."""
        if self._refusal is None:
            return self._last or error
        if REFUSED not in _text(self._refusal).lower():
            return PermissionError(f"{with_limit(_text(self._refusal))}{login.refusal()}")
        if login.setting:
            return PermissionError(f"it rejects {login.setting}{login.refusal()}")
        if login.has_certificate:
            return PermissionError(f"it maps the certificate of nats.tls_cert to no user; {OTHER}")
        return PermissionError(f"it requires credentials: {CREDENTIALS}")


def _text(refusal: LoginRefused) -> str:
    return cause(refusal).removeprefix("nats: ")


async def _cancel(task: "asyncio.Task[None]") -> None:
    """Cancel until the task ends: `wait_for`, which nats-py uses, may lose one cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_S)
