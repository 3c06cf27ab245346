"""The owner's side of transfers: checks grants, and sends bytes to readers without NIXL."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvmesh.bus.errors import cause
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.transfer.channel import Channel, Closed, Got, TransferReply, Want
from kvmesh.transfer.grants import Grant, Grants
from kvmesh.transfer.memory_ranges import Piece, Range, cut, unpack
from kvmesh.transfer.pace import SendingPace

if TYPE_CHECKING:
    from kvmesh.transfer.nixl import NixlAgent

log = logging.getLogger(__name__)
MESSAGE_S = 10.0
STALL_S = 30.0
REFUSAL_S = 1.0
BACKLOG_S = 0.5  # of bytes that wait for their turn; further readers are told to come back
MAX_REFUSALS = 16  # at once; further connections are closed without a reply
PREPARED_BYTES = 8 << 20
PROGRESS_S = 10.0  # for which a direct reader may need the owner's NIXL
PROGRESS_EVERY_S = 0.001
GOOD = TransferReply()
REVOKED = TransferReply("revoked", "the grant is unknown or has ended")
BUSY = TransferReply("busy", "too many readers")


class TransferServer:
    """Serves up to `max_readers` connected readers at once.

    `agent` is the NIXL agent for direct readers, or None. `pace` bounds the bytes per second
    of all readers together; `tos` is the IP type of service of their connections.
    """

    def __init__(
        self,
        grants: Grants,
        max_readers: int,
        agent: "NixlAgent | None",
        pace: SendingPace,
        tos: int = 0,
    ) -> None:
        self._grants = grants
        self._pace = pace
        self._tos = tos
        self._max_readers = max_readers
        self.agent = agent
        self._progress_until = 0.0
        self._progressing = False
        self._listener: socket.socket | None = None
        self._tasks = BackgroundTasks()
        self._serving = 0
        self._loop = asyncio.get_running_loop()

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=self._max_readers)
        self._listener.setblocking(False)
        self._tasks.start(self._accept(self._listener), "transfer server")
        bound: int = self._listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listener)
                self._mark(sock)
                channel = Channel(sock)
            except OSError as error:
                log.warning("cannot accept a reader: %s", error)
                await asyncio.sleep(1.0)
                continue
            if self._serving < self._max_readers + MAX_REFUSALS:
                self._serving += 1
                handle = self._refuse if self._serving > self._max_readers else self._serve_reader
                self._tasks.start(self._serve(channel, handle), "reader")
            else:
                channel.close()

    def _mark(self, sock: socket.socket) -> None:
        if self._tos and sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, self._tos)
        elif self._tos:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, self._tos)

    async def _serve(self, channel: Channel, handle: Callable[[Channel], Awaitable[None]]) -> None:
        try:
            await handle(channel)
        except (Closed, TimeoutError) as error:
            log.debug("a reader has disconnected: %s", cause(error))
        finally:
            self._serving -= 1
            channel.close()

    async def _refuse(self, channel: Channel) -> None:
        """Receive the request before the refusal: a reset connection could lose the reply."""
        async with asyncio.timeout(REFUSAL_S):
            await channel.receive(Want, lambda _: False)
            await channel.send(BUSY)

    async def _serve_reader(self, channel: Channel) -> None:
        while await self._serve_want(channel):
            continue

    async def _serve_want(self, channel: Channel) -> bool:
        """Serve one request; True if the same reader may send another."""
        async with asyncio.timeout(MESSAGE_S):
            want = await channel.receive(Want, lambda token: self._grants.find(token) is not None)
            grant, ranges, reply = self._check(want)
            if want.checked and reply.agent:
                reply = await self._in_turn(grant, ranges, reply)
            await channel.send(reply)
        if grant is None or reply.code:
            return False
        if want.checked:
            if not reply.agent:
                await self._send(channel, grant, ranges)
            return True
        if want.direct:
            await self._in_turn(grant, ranges, reply)
        else:
            await self._send(channel, grant, ranges)
        async with asyncio.timeout_at(grant.deadline + MESSAGE_S):
            got = await channel.receive(Got)
        good = grant.ended is None
        if good and got.final:
            grant.end("read")
        await channel.send(GOOD if good else REVOKED)
        return False

    def _check(self, want: Want) -> tuple[Grant | None, list[Range], TransferReply]:
        grant = self._grants.find(want.token)
        if grant is None:
            return None, [], REVOKED
        if self._pace.backlog(self._loop.time()) > BACKLOG_S:
            return None, [], BUSY
        try:
            ranges = unpack(want.ranges)
        except ValueError as error:
            return None, [], TransferReply("refused", str(error))
        refused = grant.allowed.refused(ranges)
        if refused is not None:
            reason = f"{refused.length} bytes at {refused.offset} were not granted"
            return None, [], TransferReply("refused", reason)
        region = grant.region
        size = sum(length for _, length in ranges)
        if not want.direct or (
            want.checked and not (region.direct and self._pace.is_soon(size, self._loop.time()))
        ):
            return grant, ranges, GOOD  # the bytes follow
        self._progress()
        if self.agent is None:
            return grant, ranges, GOOD
        metadata = self.agent.metadata if region.direct else b""
        return grant, ranges, TransferReply(None, "", self.agent.name, region.address, metadata)

    async def _send_range(self, channel: Channel, grant: Grant, whole: Range) -> None:
        region = grant.region
        for begin, _, size in cut([Piece(whole.offset, 0, whole.length)], PREPARED_BYTES):
            async with asyncio.timeout(STALL_S):
                await region.prepare(begin, size)
            done = 0
            while done < size:
                now = self._loop.time()
                length = min(self._pace.piece(now), size - done)
                await asyncio.sleep(self._pace.delay(length, now))
                if grant.ended is not None:
                    raise Closed("the grant has ended")
                async with asyncio.timeout(STALL_S):
                    await region.send(channel, begin + done, length)
                region.was_read(begin + done, length)
                done += length

    def _progress(self) -> None:
        """Let direct readers go on for a time."""
        self._progress_until = self._loop.time() + PROGRESS_S
        if self.agent is not None and not self._progressing:
            self._progressing = True
            self._tasks.start(self._keep_progress(self.agent), "progress of direct readers")

    async def _keep_progress(self, agent: "NixlAgent") -> None:
        try:
            while self._loop.time() < self._progress_until:
                agent.progress()
                await asyncio.sleep(PROGRESS_EVERY_S)
        finally:
            self._progressing = False

    async def _in_turn(
        self, grant: Grant | None, ranges: list[Range], reply: TransferReply
    ) -> TransferReply:
        """Return the reply once a direct reader may read within the bound of the rate."""
        size = sum(length for _, length in ranges)
        await asyncio.sleep(self._pace.delay(size, self._loop.time()))
        if grant is None or grant.ended is not None:
            return REVOKED
        for begin, length in ranges:
            grant.region.was_read(begin, length)
        return reply

    async def _send(self, channel: Channel, grant: Grant, ranges: list[Range]) -> None:
        """Send the bytes; the end of the grant cuts the channel at once."""
        grant.readers.add(channel)
        try:
            for whole in ranges:
                await self._send_range(channel, grant, whole)
        finally:
            grant.readers.discard(channel)
