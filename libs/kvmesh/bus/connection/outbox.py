"""Sends messages from plain code, in the order in which they were posted."""

import asyncio
import logging
from collections import deque

from nats.errors import Error as NatsError

from kvmesh.bus.connection.direct_client import DirectClient
from kvmesh.bus.errors import cause
from kvmesh.bus.metrics import BusCounts

log = logging.getLogger(__name__)
MAX_UNSENT = 65_536


class Outbox:
    """A queue of at most MAX_UNSENT messages in front of the connection.

    Messages wait here only while the connection's buffer is full or the connection is down. A
    series of failures is logged once.
    """

    def __init__(self, client: DirectClient, counts: BusCounts) -> None:
        self._client = client
        self._counts = counts
        self._unsent: deque[tuple[str, bytes, str]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._failing = False

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def send(self, subject: str, data: bytes, reply: str) -> None:
        if not self._unsent and self._client.try_publish(subject, data, reply):
            self._failing = False
            return
        if len(self._unsent) >= MAX_UNSENT:
            self._failed(subject, f"{MAX_UNSENT} messages are waiting")
            return
        self._unsent.append((subject, data, reply))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="posts")

    async def drained(self) -> None:
        """Return once the queue is empty."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def _send(self) -> None:
        try:
            while self._unsent:
                subject, data, reply = self._unsent[0]
                try:
                    await self._client.publish(subject, data, reply)
                    self._failing = False
                except NatsError as error:
                    self._failed(subject, cause(error))
                self._unsent.popleft()
        finally:
            self._sending = None

    def _failed(self, subject: str, reason: str) -> None:
        self._counts.failed_posts += 1
        if not self._failing:
            log.warning("cannot send on %s: %s", subject, reason)
        self._failing = True
