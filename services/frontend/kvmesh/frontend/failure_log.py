"""Log lines about failed requests: one for each cause and interval, with a count of the others."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)
INTERVAL_S = 10.0


class _Others:
    """Failures with one cause that have not been logged since the last line about it."""

    __slots__ = ("count", "request", "text")

    def __init__(self) -> None:
        self.count = 0
        self.request = self.text = ""


class RequestFailures:
    """Writes the first failure of a cause at once, and those of the next INTERVAL_S as one line.

    `later(seconds, function)` calls the function then. Causes are the kinds of errors, so few.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._others: dict[str, _Others] = {}

    def failed(
        self,
        cause: str,
        request: str,
        text: str,
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """Log that a request failed."""
        others = self._others.get(cause)
        if others is None:
            self._others[cause] = _Others()
            self._write(f"request {request} failed: {text}")
            later(INTERVAL_S, lambda: self._end(cause, later))
            return
        others.count += 1
        others.request, others.text = request, text

    def _end(self, cause: str, later: Callable[[float, Callable[[], None]], object]) -> None:
        others = self._others.pop(cause)
        if not others.count:
            return
        more = "1 more request" if others.count == 1 else f"{others.count:,} more requests"
        self._write(f"{more} failed within {INTERVAL_S:g} s, last {others.request}: {others.text}")
        self._others[cause] = _Others()
        later(INTERVAL_S, lambda: self._end(cause, later))


_failures = RequestFailures(lambda line: log.warning("%s", line))


def log_failure(cause: str, request: str, text: str) -> None:
    """Log a failed request of this process, in its event loop."""
    _failures.failed(cause, request, text, asyncio.get_running_loop().call_later)
