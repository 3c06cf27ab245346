"""Which of several processes of a role to ask: those that answer take turns, silent ones sit out.

Pure. Times are those of the caller's clock, in seconds.
"""

from collections import deque
from collections.abc import Collection

PROBE_S = 0.25


class Standing:
    """What is known of one process."""

    __slots__ = ("heard", "probed", "suspected")

    def __init__(self) -> None:
        self.suspected = False
        self.heard = 0.0
        self.probed = 0.0


class Peers:
    """Processes by instance, trusted or suspected.

    One is suspected once it has left something unanswered, and trusted again when it answers a
    probe within `limit` seconds: one that answers, but late, is no use.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._standing: dict[str, Standing] = {}
        self._turns: deque[str] = deque()

    def __contains__(self, instance: str) -> bool:
        return instance in self._standing

    def joined(self, instance: str) -> None:
        if instance not in self._standing:
            self._standing[instance] = Standing()
            self._turns.append(instance)

    def left(self, instance: str) -> None:
        if self._standing.pop(instance, None) is not None:
            self._turns.remove(instance)

    def choose(self, but: Collection[str] = ()) -> str | None:
        """The next in turn, a suspected one only if there is no other; None if all are `but`."""
        self._turns.rotate(-1)
        left = [instance for instance in self._turns if instance not in but]
        return next(filter(self.trusts, left), left[0] if left else None)

    def trusts(self, instance: str) -> bool:
        standing = self._standing.get(instance)
        return standing is not None and not standing.suspected

    def trusts_any(self, but: Collection[str] = ()) -> bool:
        """Whether there is a trusted one besides these."""
        return any(self.trusts(each) for each in self._turns if each not in but)

    def suspect(self, instance: str) -> bool:
        """It has not answered in time. True if it was trusted until now."""
        standing = self._standing.get(instance)
        if standing is None or standing.suspected:
            return False
        standing.suspected = True
        return True

    def heard(self, instance: str, now: float, took: float) -> bool:
        """It has answered after `took` seconds. True if it was suspected until now."""
        standing = self._standing.get(instance)
        if standing is None or took > self._limit:
            return False
        standing.heard = now
        suspected, standing.suspected = standing.suspected, False
        return suspected

    def silent(self, instance: str, now: float) -> bool:
        """Whether nothing was heard of it for longer than the limit."""
        standing = self._standing.get(instance)
        return standing is None or now - standing.heard > self._limit

    def to_probe(self, now: float, busy: Collection[str] = ()) -> list[str]:
        """Those to be asked for a sign of life now: the suspected ones, and the `busy`."""
        due = [
            instance
            for instance, standing in self._standing.items()
            if (standing.suspected or instance in busy) and now - standing.probed >= PROBE_S
        ]
        for instance in due:
            self._standing[instance].probed = now
        return due
