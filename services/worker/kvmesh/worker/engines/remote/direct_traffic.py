"""The requests in a server: an estimate of those that reach it directly, and this worker's own."""

from math import inf
from typing import NamedTuple

from kvmesh.worker.engines.remote.gauges import Gauges

STALE_S = 5.0


class OtherRequests(NamedTuple):
    """Requests of a server's other clients."""

    running: int = 0
    waiting: int = 0


class DirectTraffic:
    """Compares the server's gauges with the requests that this worker has in it.

    A server updates its gauges when it takes a step, so that those of requests aborted since stay:
    without a step the last estimate stays, and without one in STALE_S seconds there are none.
    """

    def __init__(self) -> None:
        self._steps: float | None = None
        self._stepped_at = -inf
        self._others = OtherRequests()

    def update(self, gauges: Gauges, own: int, now: float) -> OtherRequests:
        """The other clients' requests; `own` is the number of this worker's, `now` in seconds."""
        if gauges.steps is None or gauges.steps != self._steps:
            self._steps, self._stepped_at = gauges.steps, now
            running, waiting = gauges.running or 0, gauges.waiting or 0
            others = max(0, running + waiting - own)
            self._others = OtherRequests(others, min(others, waiting))
        elif now - self._stepped_at > STALE_S:
            self._others = OtherRequests()
        return self._others


class OwnRequests:
    """The requests that this worker has in a server, with times in seconds.

    `most` is the highest number at once since `restart_most`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.most = 0
        self._busy_s = 0.0
        self._since = 0.0

    def begin(self, now: float) -> None:
        if not self.count:
            self._since = now
        self.count += 1
        self.most = max(self.most, self.count)

    def end(self, now: float) -> None:
        self.count -= 1
        if not self.count:
            self._busy_s += now - self._since

    def restart_most(self) -> None:
        self.most = self.count

    def take_busy_s(self, now: float) -> float:
        """The time since the last call in which there were requests."""
        busy_s = self._busy_s + (now - self._since if self.count else 0.0)
        self._busy_s, self._since = 0.0, now
        return busy_s
