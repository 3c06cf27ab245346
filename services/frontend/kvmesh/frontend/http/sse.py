"""Server-sent events to one client, written from the event loop without a task per write.

A reader that does not keep up is paused: past `HIGH` buffered bytes nothing more is written and
its tokens wait as numbers. If it stays blocked it is cut.
"""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import HttpVersion11, web

log = logging.getLogger(__name__)
HIGH = 256 << 10
TICK_S = 0.25
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """The open response of one request. `write` sends a frame at once and never waits."""

    def __init__(self, http: web.Request, request_id: str) -> None:
        self._http = http
        self._response = web.StreamResponse(headers={**HEADERS, "X-Request-Id": request_id})
        self._transport: asyncio.Transport | None = None
        self._chunked = http.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        self.wrote_at = 0.0
        self.blocked_since: float | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def open(self, first: bytes) -> None:
        """Send the headers with the first frame."""
        await self._response.prepare(self._http)
        await self._response.write(first)
        self._transport = self._http.transport
        if self._transport is None:
            raise ConnectionResetError("the client is gone")
        self.wrote_at = self._loop.time()

    @property
    def writable(self) -> bool:
        """Whether the client keeps up."""
        transport = self._transport
        if transport is None:
            return False
        blocked = transport.get_write_buffer_size() > HIGH
        if not blocked:
            self.blocked_since = None
        elif self.blocked_since is None:
            self.blocked_since = self._loop.time()
        return not blocked

    def write(self, frame: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._chunked:
            transport.write(b"%x\r\n%b\r\n" % (len(frame), frame))
        else:
            transport.write(frame)
        self.wrote_at = self._loop.time()

    async def close(self, last: bytes) -> web.StreamResponse:
        await self._response.write_eof(last)
        return self._response

    def cut(self) -> None:
        """Drop the connection; its handler is cancelled by that."""
        if self._transport is not None:
            self._transport.abort()


class StreamSupervisor:
    """Periodic care of all open streams: keep-alives, resuming and cutting of slow readers."""

    def __init__(self, keepalive_s: float, patience_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._patience_s = patience_s
        self._streams: dict[EventStream, tuple[bytes, Callable[[], None]]] = {}

    def add(self, stream: EventStream, keepalive: bytes, resume: Callable[[], None]) -> None:
        """`resume` is called when a blocked reader has caught up."""
        self._streams[stream] = (keepalive, resume)

    def remove(self, stream: EventStream) -> None:
        self._streams.pop(stream, None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            for stream, (keepalive, resume) in list(self._streams.items()):
                self._care(stream, keepalive, resume, loop.time())

    def _care(
        self, stream: EventStream, keepalive: bytes, resume: Callable[[], None], now: float
    ) -> None:
        since = stream.blocked_since
        if since is not None:
            if stream.writable:
                resume()
            elif now - since > self._patience_s:
                log.warning("cut a client that has not read for %.0f s", now - since)
                stream.cut()
        elif stream.is_open and now - stream.wrote_at > self._keepalive_s and stream.writable:
            stream.write(keepalive)
