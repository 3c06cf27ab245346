"""Requests that reach a server directly, estimated from its metrics."""

from math import inf
from typing import NamedTuple

from kvmesh.worker.engines.remote.server import Gauges

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
