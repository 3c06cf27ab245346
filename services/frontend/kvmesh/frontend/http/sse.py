"""Server-sent events, written from the event loop without a task per write.

A stream with more than `HIGH_WATER_BYTES` buffered bytes is blocked: new tokens are not rendered
until the client has caught up. A client that stays blocked is disconnected.
"""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import HttpVersion11, web

from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
HIGH_WATER_BYTES = 256 << 10
TICK_S = 0.25
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class _Response(web.StreamResponse):
    """A response whose headers leave with its first frame, in one write."""

    _send_headers_immediately = False


class EventStream:
    """The streaming response of one request; `write` never waits."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self._response = _Response(headers=HEADERS)
        self._transport: asyncio.Transport | None = None
        self._first: list[bytes] | None = None  # frames that leave with the headers
        self._chunked = http.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        self.wrote_at = 0.0
        self.blocked_since: float | None = None
        self.failed = False  # the stream ends with an error

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def open(self, first: bytes, flush: Callable[[], None]) -> None:
        """Send the headers with the first frame and with those that `flush` writes."""
        await self._response.prepare(self._http)
        self._transport = self._http.transport
        if self._transport is None:
            raise ConnectionResetError("the client has disconnected")
        self._first = frames = [first]
        flush()
        self._first = None
        await self._response.write(b"".join(frames))
        self.wrote_at = self._loop.time()

    @property
    def writable(self) -> bool:
        """True if the client keeps up; otherwise `blocked_since` is set."""
        transport = self._transport
        if transport is None:
            return False
        blocked = transport.get_write_buffer_size() > HIGH_WATER_BYTES
        if not blocked:
            self.blocked_since = None
        elif self.blocked_since is None:
            self.blocked_since = self._loop.time()
        return not blocked

    def write(self, frame: bytes) -> None:
        transport = self._transport
        if self._first is not None:
            self._first.append(frame)
            return
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
        """Abort the connection, which cancels the handler."""
        if self._transport is not None:
            self._transport.abort()


class StreamSupervisor:
    """Sends keep-alives on all open streams, resumes slow readers and disconnects blocked ones."""

    def __init__(self, keepalive_s: float, slow_reader_s: float) -> None:
        self._keepalive_s = keepalive_s
        self.slow_reader_s = slow_reader_s
        self._streams: dict[EventStream, tuple[bytes, Callable[[], None]]] = {}
        self._any = asyncio.Event()

    def add(self, stream: EventStream, keepalive: bytes, resume: Callable[[], None]) -> None:
        """Supervise a stream; `resume` is called when a blocked reader has caught up."""
        self._streams[stream] = (keepalive, resume)
        self._any.set()

    def remove(self, stream: EventStream) -> None:
        self._streams.pop(stream, None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._streams:
                self._any.clear()
                await self._any.wait()
            await next_tick(TICK_S)
            for stream, (keepalive, resume) in list(self._streams.items()):
                self._check(stream, keepalive, resume, loop.time())

    def _check(
        self, stream: EventStream, keepalive: bytes, resume: Callable[[], None], now: float
    ) -> None:
        since = stream.blocked_since
        if since is not None:
            if stream.writable:
                resume()
            elif now - since > self.slow_reader_s:
                log.warning("disconnecting a client that has not read for %.0f s", now - since)
                stream.cut()
        elif stream.is_open and now - stream.wrote_at > self._keepalive_s and stream.writable:
            stream.write(keepalive)
