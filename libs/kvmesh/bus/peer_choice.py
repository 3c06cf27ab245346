"""The choice among processes of a role: those that answer take turns, silent ones sit out.

Pure. Times are those of the caller's clock, in seconds.
"""

from collections import deque
from collections.abc import Collection

PROBE_S = 0.25


class Peer:
    """One process, as whoever asks it knows it."""

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
        self._known: dict[str, Peer] = {}
        self._turns: deque[str] = deque()

    def __contains__(self, instance: str) -> bool:
        return instance in self._known

    @property
    def instances(self) -> Collection[str]:
        return self._known.keys()

    def joined(self, instance: str) -> None:
        if instance not in self._known:
            self._known[instance] = Peer()
            self._turns.append(instance)

    def left(self, instance: str) -> None:
        if self._known.pop(instance, None) is not None:
            self._turns.remove(instance)

    def choose(self, but: Collection[str] = ()) -> str | None:
        """The next in turn, a suspected one only if there is no other; None if all are `but`."""
        self._turns.rotate(-1)
        left = [instance for instance in self._turns if instance not in but]
        return next(filter(self.trusts, left), left[0] if left else None)

    def trusts(self, instance: str) -> bool:
        peer = self._known.get(instance)
        return peer is not None and not peer.suspected

    def trusts_any(self, but: Collection[str] = ()) -> bool:
        """Whether there is a trusted one besides these."""
        return any(self.trusts(each) for each in self._turns if each not in but)

    def suspect(self, instance: str) -> bool:
        """It has not answered in time. True if it was trusted until now."""
        peer = self._known.get(instance)
        if peer is None or peer.suspected:
            return False
        peer.suspected = True
        return True

    def heard(self, instance: str, now: float, took: float) -> bool:
        """It has answered after `took` seconds. True if it was suspected until now."""
        peer = self._known.get(instance)
        if peer is None or took > self._limit:
            return False
        peer.heard = now
        suspected, peer.suspected = peer.suspected, False
        return suspected

    def silent(self, instance: str, now: float) -> bool:
        """Whether nothing was heard of it for longer than the limit."""
        peer = self._known.get(instance)
        return peer is None or now - peer.heard > self._limit

    def to_probe(self, now: float, busy: Collection[str] = ()) -> list[str]:
        """Those to be asked for a sign of life now: the suspected ones, and the `busy`."""
        due = [
            instance
            for instance, peer in self._known.items()
            if (peer.suspected or instance in busy) and now - peer.probed >= PROBE_S
        ]
        for instance in due:
            self._known[instance].probed = now
        return due
