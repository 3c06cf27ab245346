"""Readiness of a replica: a pure rule over its lag."""


class IndexerReadiness:
    """Ready once caught up; not ready after the lag exceeded `limit` seconds twice in a row.

    It becomes ready again at half the limit, so that a replica at the edge does not flap.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._exceeded = 0
        self.ready = False

    def update(self, lag: float) -> bool:
        """Apply one sample, a fraction of a second after the last; returns whether it is ready."""
        self._exceeded = self._exceeded + 1 if lag > self._limit else 0
        if self._exceeded >= 2:
            self.ready = False
        elif lag <= self._limit / 2:
            self.ready = True
        return self.ready
