"""Choice among the processes of a role, without those suspected of being down.

Pure. Times are those of the caller's clock, in seconds, unless they are Unix times.
"""

from collections import deque
from collections.abc import Collection, Iterable
from hashlib import blake2b

PROBE_S = 0.25
TURN_S = 0.05  # of one process: much longer than a message takes to the others
MOST_IN_TURN = 64  # choices of one process in a row: a larger burst is divided


class Peer:
    """The state of one process: trusted or suspected, and the last times of a reply and a probe."""

    __slots__ = ("probed_at", "replied_at", "suspected")

    def __init__(self) -> None:
        self.suspected = False
        self.replied_at = 0.0
        self.probed_at = 0.0


class Peers:
    """Processes by instance, trusted or suspected.

    A process becomes suspected when it misses a reply, and trusted again when it replies to a probe
    within `limit` seconds; a late reply does not count.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._known: dict[str, Peer] = {}
        self._order: deque[str] = deque()
        self._turn = -1
        self._chosen = 0
        self._in_turn: list[str] = []

    def __contains__(self, instance: str) -> bool:
        return instance in self._known

    @property
    def instances(self) -> Collection[str]:
        return self._known.keys()

    def joined(self, instance: str) -> None:
        if instance not in self._known:
            self._known[instance] = Peer()
            self._order.append(instance)
            self._turn = -1

    def left(self, instance: str) -> None:
        if self._known.pop(instance, None) is not None:
            self._order.remove(instance)
            self._turn = -1

    def choose(self, excluded: Collection[str] = ()) -> str | None:
        """The next process; a suspected one only if no other is left; None if all are excluded."""
        self._order.rotate(-1)
        return self._first(self._order, excluded)

    def choose_at(self, time: float, excluded: Collection[str] = ()) -> str | None:
        """The process whose turn it is at a Unix time, for all that choose; others as in `choose`.

        Turns of TURN_S are in an order without a period. After MOST_IN_TURN choices within one, the
        next process follows.
        """
        turn = int(time / TURN_S)
        if turn != self._turn:
            self._turn, self._chosen = turn, 0
            self._in_turn = sorted(self._known, key=lambda name: _rank(name, turn))
        found = self._first(self._in_turn, excluded)
        self._chosen += 1
        if self._chosen >= MOST_IN_TURN and len(self._in_turn) > 1:
            self._chosen = 0
            self._in_turn.append(self._in_turn.pop(0))
        return found

    def _first(self, order: Iterable[str], excluded: Collection[str]) -> str | None:
        eligible = [instance for instance in order if instance not in excluded]
        return next(filter(self.trusts, eligible), eligible[0] if eligible else None)

    def trusts(self, instance: str) -> bool:
        peer = self._known.get(instance)
        return peer is not None and not peer.suspected

    def trusts_any(self, excluded: Collection[str] = ()) -> bool:
        """True if a process is trusted and not excluded."""
        return any(self.trusts(each) for each in self._order if each not in excluded)

    @property
    def suspects_any(self) -> bool:
        """True if a process is suspected."""
        return any(peer.suspected for peer in self._known.values())

    def suspect(self, instance: str) -> bool:
        """Record a missed reply. True if the process was trusted until now."""
        peer = self._known.get(instance)
        if peer is None or peer.suspected:
            return False
        peer.suspected = True
        return True

    def replied(self, instance: str, now: float, took: float) -> bool:
        """Record a reply after `took` seconds. True if the process was suspected until now."""
        peer = self._known.get(instance)
        if peer is None or took > self._limit:
            return False
        peer.replied_at = now
        suspected, peer.suspected = peer.suspected, False
        return suspected

    def silent(self, instance: str, now: float) -> bool:
        """True if its last reply is older than the limit."""
        peer = self._known.get(instance)
        return peer is None or now - peer.replied_at > self._limit

    def to_probe(self, now: float, busy: Collection[str] = ()) -> list[str]:
        """The processes to probe now: suspected ones and those in `busy`."""
        due = [
            instance
            for instance, peer in self._known.items()
            if (peer.suspected or instance in busy) and now - peer.probed_at >= PROBE_S
        ]
        for instance in due:
            self._known[instance].probed_at = now
        return due


def _rank(instance: str, turn: int) -> bytes:
    """The position of a process in a turn; the least comes first."""
    return blake2b(f"{instance} {turn}".encode(), digest_size=8).digest()
