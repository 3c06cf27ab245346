"""Leaves a server that is about to stop ("lame duck mode") before it ends the connection."""

import asyncio
import logging
import random

from nats.errors import Error as NatsError

from kvmesh.bus.connection.direct_client import DirectClient
from kvmesh.bus.errors import cause

log = logging.getLogger(__name__)
SPREAD_S = 5.0  # over which the processes of a mesh leave; the server waits 10 s by default
QUIET_S = 1.0  # of waiting for a moment without pending replies
QUIET_POLL_S = 0.005
RETRY_S = 1.0  # while no other server replies


class LameDuck:
    """Moves a connection off a server that has sent the notice.

    It moves when no reply is pending, and only if another server accepts connections: until then,
    or without another server, the connection serves until its server ends it. `leaving` is True
    while it moves.
    """

    def __init__(self, client: DirectClient) -> None:
        self._client = client
        self._moving: asyncio.Task[None] | None = None
        self.leaving = False

    async def notice(self) -> None:
        """The server has sent the notice."""
        if self._moving is None or self._moving.done():
            self._moving = asyncio.create_task(self._move(), name="lame duck")

    def stop(self) -> None:
        """The connection has ended."""
        self.leaving = False
        if self._moving is not None:
            self._moving.cancel()

    async def _move(self) -> None:
        client = self._client
        log.info("%s is about to stop: moving to another server", client.server)
        await asyncio.sleep(random.uniform(0.0, SPREAD_S))
        while not await client.reaches_another_server():
            await asyncio.sleep(RETRY_S)
        loop = asyncio.get_running_loop()
        latest = loop.time() + QUIET_S
        while client.awaits_replies and loop.time() < latest:
            await asyncio.sleep(QUIET_POLL_S)
        self.leaving = True
        try:
            await client.leave_server()
        except (NatsError, OSError) as error:  # the server has ended the connection meanwhile
            log.debug("left without farewell: %s", cause(error))
