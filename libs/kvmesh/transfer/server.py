"""The owner's side: who may read what, and the bytes for those who cannot reach them directly."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from kvmesh.bus.errors import cause
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.transfer.channel import Channel, Closed, Got, TransferReply, Want
from kvmesh.transfer.grants import Grant, Grants
from kvmesh.transfer.memory_ranges import Range, unpack

log = logging.getLogger(__name__)
WORD_S = 10.0
STALL_S = 30.0
REFUSAL_S = 1.0
MOST_REFUSALS = 16  # at once; whoever comes beyond is not even told why
GOOD = TransferReply()
REVOKED = TransferReply("revoked", "there is no such grant, or no more")
BUSY = TransferReply("busy", "too many readers")


class TransferServer:
    """Serves up to `most` readers at once, which count from when they connect.

    `agent` names what direct readers read from.
    """

    def __init__(self, grants: Grants, most: int, agent: str) -> None:
        self._grants = grants
        self._most = most
        self._agent = agent
        self._listener: socket.socket | None = None
        self._tasks = BackgroundTasks()
        self._serving = 0
        self._loop = asyncio.get_running_loop()

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=self._most)
        self._listener.setblocking(False)
        self._tasks.start(self._accept(self._listener), "block server")
        own: int = self._listener.getsockname()[1]
        return own

    async def close(self) -> None:
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listener)
                channel = Channel(sock)
            except OSError as error:
                log.warning("cannot take a reader of KV blocks: %s", error)
                await asyncio.sleep(1.0)
                continue
            if self._serving < self._most + MOST_REFUSALS:
                self._serving += 1
                talk = self._refuse if self._serving > self._most else self._talk
                self._tasks.start(self._serve(channel, talk), "block reader")
            else:
                channel.close()

    async def _serve(self, channel: Channel, talk: Callable[[Channel], Awaitable[None]]) -> None:
        try:
            await talk(channel)
        except (Closed, TimeoutError) as error:
            log.debug("a reader of KV blocks has gone: %s", cause(error))
        finally:
            self._serving -= 1
            channel.close()

    async def _refuse(self, channel: Channel) -> None:
        """Hear it out: an answer to somebody who still talks may be lost."""
        async with asyncio.timeout(REFUSAL_S):
            await channel.receive(Want, lambda _: False)
            await channel.send(BUSY)

    async def _talk(self, channel: Channel) -> None:
        async with asyncio.timeout(WORD_S):
            want = await channel.receive(Want, lambda token: self._grants.find(token) is not None)
            grant, ranges, answer = self._check(want)
            await channel.send(answer)
        if grant is None:
            return
        if not want.direct:
            await self._send(channel, grant, ranges)
        async with asyncio.timeout_at(grant.deadline + WORD_S):
            got = await channel.receive(Got)
        good = grant.ended is None
        if good and got.final:
            grant.end("read")
        await channel.send(GOOD if good else REVOKED)

    def _check(self, want: Want) -> tuple[Grant | None, list[Range], TransferReply]:
        grant = self._grants.find(want.token)
        if grant is None:
            return None, [], REVOKED
        try:
            ranges = unpack(want.ranges)
        except ValueError as error:
            return None, [], TransferReply("refused", str(error))
        refused = grant.allowed.refused(ranges)
        if refused is not None:
            reason = f"{refused.length} bytes at {refused.offset} were not granted"
            return None, [], TransferReply("refused", reason)
        if not want.direct:
            return grant, ranges, GOOD
        region = grant.region
        known = TransferReply(agent=self._agent, base=region.address, metadata=region.metadata)
        return grant, ranges, known

    async def _send(self, channel: Channel, grant: Grant, ranges: list[Range]) -> None:
        """The bytes; once the grant ends, its channel is cut in the middle of them."""
        grant.readers.add(channel)
        try:
            for offset, length in ranges:
                if grant.ended is not None:
                    raise Closed("the grant has ended")
                async with asyncio.timeout(STALL_S):
                    await channel.send_bytes(grant.region.view[offset : offset + length])
        finally:
            grant.readers.discard(channel)
