"""Bound of the rate at which an owner sends bytes. Pure."""

import sys

BURST_S = 0.1
SOON_S = 0.5


class SendingPace:
    """At most `bytes_per_s`, after short bursts; 0: no bound. Counts the bytes."""

    def __init__(self, bytes_per_s: float = 0) -> None:
        self.rate = bytes_per_s
        self.sent = 0
        self._free_at = 0.0

    @property
    def piece(self) -> int:
        """Most bytes to send at once, so that waiting readers alternate."""
        return max(int(self.rate * BURST_S), 1 << 10) if self.rate else sys.maxsize

    def delay(self, size: int, now: float) -> float:
        """Book `size` bytes; returns the seconds until they may be sent."""
        self.sent += size
        if not self.rate:
            return 0.0
        begin = max(self._free_at, now - BURST_S)
        self._free_at = begin + size / self.rate
        return max(0.0, begin - now)

    def is_soon(self, size: int) -> bool:
        """True if `size` bytes need less than SOON_S at this rate."""
        return not self.rate or size < self.rate * SOON_S

    def backlog(self, now: float) -> float:
        """Seconds until further bytes may be sent."""
        return max(0.0, self._free_at - now)
