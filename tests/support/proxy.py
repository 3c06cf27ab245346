"""A TCP proxy between a process and a server, which delays, throttles, holds or cuts traffic."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

CHUNK = 64 << 10
MOST_CHUNKS = 1024  # in flight per direction of a connection; then the sender waits


class Proxy:
    """Forwards a port of `address` (`listen`, or a free one) to `port`, in its own thread.

    Settings apply to all present and future connections in both directions. `delay_s` delays every
    packet; packets stay in order and their delays overlap. `bytes_per_s` limits each direction of
    each connection.
    """

    def __init__(
        self, port: int, host: str = "127.0.0.1", listen: int = 0, address: str = "127.0.0.1"
    ) -> None:
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.port = listen
        self._target = host, port
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._links: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        """The URL for NATS clients."""
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen; `port` is known from now on."""
        self._thread.start()
        self._call(self._listen())

    def hold(self) -> None:
        """Start a partition: no data passes, connections stay open, new ones are accepted."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        """End the partition: the held data passes in order."""
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Break every connection and lose its data in flight; new ones are accepted."""
        self._call(self._cut())

    def stop(self) -> None:
        """Break every connection and accept no more."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._address, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        links = list(self._links)
        for link in links:
            link.cancel()
        if links:
            await asyncio.wait(links)

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        await asyncio.sleep(0)  # lets aborted connections close their sockets

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.create_task(self._link(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side ends it."""
        writers = [writer]
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            writers.append(target_writer)
            outbound = asyncio.create_task(self._forward(reader, target_writer))
            inbound = asyncio.create_task(self._forward(target_reader, writer))
            try:
                await asyncio.wait([outbound, inbound], return_when=asyncio.FIRST_COMPLETED)
            finally:
                outbound.cancel()
                inbound.cancel()
                await asyncio.wait([outbound, inbound])
        except OSError:
            return  # the server is down: the client's connection ends
        finally:
            for each in writers:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until its end."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_CHUNKS)
        sending = asyncio.create_task(self._send(chunks, writer))
        try:
            data = b"begin"
            while data:
                try:
                    data = await reader.read(CHUNK)
                except OSError:
                    data = b""
                await chunks.put((time.monotonic() + self.delay_s, data))
            await sending
        finally:
            sending.cancel()

    async def _send(
        self, chunks: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
    ) -> None:
        """Send each chunk when it is due; an empty one is the end."""
        while True:
            due, data = await chunks.get()
            await asyncio.sleep(due - time.monotonic())
            await self._open.wait()
            if not data:
                return
            try:
                writer.write(data)
                await writer.drain()
            except OSError:
                return
            if self.bytes_per_s is not None:
                await asyncio.sleep(len(data) / self.bytes_per_s)
