"""Bound of the rate at which an owner sends bytes. Pure."""

import sys
from collections.abc import Callable

BURST_S = 0.1
SOON_S = 0.5
PIECE = 2 << 20  # sent at once while the bound may change


class SendingPace:
    """At most `bytes_per_s`, after short bursts; 0: no bound. Counts the bytes.

    `bound` returns another bound, which may change, for a time.
    """

    def __init__(
        self, bytes_per_s: float = 0, bound: Callable[[float], float] | None = None
    ) -> None:
        self.sent = 0
        self._fixed = bytes_per_s
        self._bound = bound
        self._free_at = 0.0

    def rate(self, now: float) -> float:
        """Bytes/s that may be sent now; 0: no bound."""
        bound = self._bound(now) if self._bound is not None else 0.0
        return min(self._fixed, bound) if self._fixed and bound else self._fixed or bound

    def piece(self, now: float) -> int:
        """Most bytes to send at once, so that waiting readers alternate."""
        rate = self.rate(now)
        if rate:
            return max(int(rate * BURST_S), 1 << 10)
        return sys.maxsize if self._bound is None else PIECE

    def delay(self, size: int, now: float) -> float:
        """Book `size` bytes; returns the seconds until they may be sent."""
        self.sent += size
        rate = self.rate(now)
        if not rate:
            return 0.0
        begin = max(self._free_at, now - BURST_S)
        self._free_at = begin + size / rate
        return max(0.0, begin - now)

    def is_soon(self, size: int, now: float) -> bool:
        """True if `size` bytes need less than SOON_S at this rate."""
        rate = self.rate(now)
        return not rate or size < rate * SOON_S

    def backlog(self, now: float) -> float:
        """Seconds until further bytes may be sent."""
        return max(0.0, self._free_at - now)
