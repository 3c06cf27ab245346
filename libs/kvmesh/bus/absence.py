"""Tells a process that is gone from one that is changing servers. Pure.

The NATS server answers a request at once if no process listens on its subject. That alone is no
death: in a cluster, a process whose server stops listens again some milliseconds later on another
one, and so does a process that its server has disconnected.
"""

ASK_FIRST_S, ASK_S = 0.005, 0.05  # between two requests to a subject on which no process listens
GONE_S = 1.0  # without a listener: a process reconnects much sooner
ALONE_GONE_S = 0.5  # with one server, which has no reason to disconnect one process in a roll
REJOIN_S = 2.0  # after this process has connected, while others may be reconnecting, too


class Absence:
    """The refusals of one subject since a process was last known to listen there.

    `clustered`: there are servers to change to.
    """

    __slots__ = ("_gone_s", "_since")

    def __init__(self, clustered: bool) -> None:
        self._gone_s = GONE_S if clustered else ALONE_GONE_S
        self._since: float | None = None

    def refused(self, now: float, connected_at: float) -> bool:
        """Record that no process listens; True once that means that the process is gone.

        `connected_at` is when this process has connected. Both times are of one clock, in seconds.
        """
        if self._since is None:
            self._since = now
        return now - self._since >= self._gone_s and now - connected_at >= REJOIN_S

    def wait_s(self, now: float) -> float:
        """Seconds until the next request: few at first, as a process returns soon or not at all."""
        since = now if self._since is None else self._since
        return min(max((now - since) / 4, ASK_FIRST_S), ASK_S)

    def replied(self) -> None:
        """A process listens."""
        self._since = None
