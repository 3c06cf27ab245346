"""Admission of requests to one frontend, by the shares of tenants. Pure."""

from kvmesh.frontend.errors import Overloaded

BEHIND_S = 2.0  # a frontend that reads so late takes no more from those who have most of it


class Admission:
    """Requests in flight by tenant, at most `limit` of all.

    Beyond the limit, and while the frontend is behind with what it has to read, a tenant gets in
    that has less than an equal share: together at most `limit` more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._running: dict[str, int] = {}
        self._all = 0

    def enter(self, tenant: str, behind_s: float) -> None:
        """Count a request; raises Overloaded (503, with a time to retry) if there is no room."""
        own = self._running.get(tenant, 0)
        tenants = len(self._running) + (0 if own else 1)
        full = self._all >= self.limit and own >= self.limit / tenants
        if full or self._all >= 2 * self.limit:
            raise Overloaded("The server is at its limit of concurrent requests.")
        if behind_s > BEHIND_S and own >= max(self._all / tenants, 1):
            reason = f"The server is {behind_s:.0f} s behind with the requests that it has."
            raise Overloaded(reason, behind_s)
        self._running[tenant] = own + 1
        self._all += 1

    def leave(self, tenant: str) -> None:
        self._all -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
