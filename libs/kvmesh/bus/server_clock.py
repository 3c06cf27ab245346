"""The time of the NATS server, which all processes of a mesh share. Pure."""

from math import inf

WINDOW_S = 30.0
LEAST_S = 2.0  # a smaller difference is that of the messages' way, or of little account


class ServerClock:
    """Estimates the server's Unix time from the times at which it stored what arrives now.

    Messages take time to arrive, so the largest difference to this machine's clock is the closest.
    """

    def __init__(self) -> None:
        self._since = -inf
        self._ahead = self._ahead_before = -inf  # in this window and the one before, in seconds

    def heard(self, stored: float, now: float) -> None:
        """A message that was stored just before has arrived at Unix time `now` of this machine."""
        if not 0 <= now - self._since <= WINDOW_S:  # also if this machine's clock was set back
            self._ahead_before, self._ahead, self._since = self._ahead, -inf, now
        self._ahead = max(self._ahead, stored - now)

    def time(self, now: float) -> float:
        """The server's time at `now`; that is the time itself before anything was heard."""
        ahead = max(self._ahead, self._ahead_before)
        return now if abs(ahead) < LEAST_S or ahead == -inf else now + ahead
