"""Tells whether this process reads in time what the NATS server has for it.

Replies arrive behind whatever was sent before them. A process that is late, with tokens unread or
stopped for a while, must not take its own delay for the silence of others. The server answers PING
in the order of its other messages: once PONG is read, so is every reply that the server had.
"""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

from nats.errors import Error as NatsError

LATE_S = 0.1  # of a round trip; a timer is this late only if the process was stopped or stalled
REST_S = 2.0  # without anything to read, after which a process has read all that there was
PATIENCE_S = 30.0  # for one round trip; a server that says nothing for longer is given up


class Promptness:
    """Round trips to the server on the connection that carries replies, one at a time.

    `ping(timeout)` returns once the server's PONG is read, and raises if it does not come.
    """

    def __init__(self, ping: Callable[[float], Awaitable[None]]) -> None:
        self._ping = ping
        self._trip: asyncio.Task[None] | None = None
        self._sent_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._reads_since = -inf

    @property
    def late(self) -> bool:
        """True while a round trip takes longer than LATE_S; `check` begins one."""
        return self._trip is not None and self._loop.time() - self._sent_at > LATE_S

    @property
    def behind_s(self) -> float:
        """Seconds by which this process reads late; 0 if it is prompt, or has not been checked.

        Only the time counts in which it has read without a rest: a server that is silent itself
        leaves it nothing to read.
        """
        if not self.late:
            return 0.0
        return max(0.0, self._heard_at - max(self._sent_at, self._reads_since))

    @property
    def silent_s(self) -> float:
        """Seconds since something of the server was read."""
        return self._loop.time() - self._heard_at

    def heard(self) -> None:
        """Note that something of the server was read."""
        now = self._loop.time()
        if now - self._heard_at > REST_S:
            self._reads_since = now
        self._heard_at = now

    def check(self) -> None:
        """Begin a round trip, unless one is on its way."""
        if self._trip is None:
            self._sent_at = self._loop.time()
            self._trip = self._loop.create_task(self._run(), name="promptness")
            self._trip.add_done_callback(self._ended)

    async def caught_up(self) -> float:
        """Return once all that the server has by now is read, or the connection is lost.

        Returns the seconds that this took.
        """
        began = self._loop.time()
        if (trip := self._trip) is not None:  # begun earlier, it may miss the latest replies
            await asyncio.wait([trip])
        self.check()
        if (trip := self._trip) is not None:
            await asyncio.wait([trip])
        return self._loop.time() - began

    def disconnected(self) -> None:
        """No PONG will come on this connection."""
        if self._trip is not None:
            self._trip.cancel()
            self._trip = None

    async def _run(self) -> None:
        try:
            await self._ping(PATIENCE_S)
        except (NatsError, OSError, RuntimeError):
            return  # the connection is gone, and with it the replies

    def _ended(self, trip: asyncio.Task[None]) -> None:
        """Also of a trip that was cancelled before it began."""
        if self._trip is trip:
            self._trip = None
