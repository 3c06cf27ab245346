"""Streams of answers, as server-sent events, written from the event loop without a task per write.

A stream with more than `HIGH_WATER_BYTES` buffered bytes is blocked: new tokens are not rendered
until the client has caught up. A client that stays blocked is disconnected.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
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


class AnswerStream(ABC):
    """A stream of frames to the client of one request; `write` never waits.

    `failed` is set if it ends with an error.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._first: list[bytes] | None = None  # frames that leave together as the first ones
        self._loop = asyncio.get_running_loop()
        self.wrote_at = 0.0
        self.blocked_since: float | None = None
        self.failed = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def open(self, first: bytes, flush: Callable[[], None]) -> None:
        """Begin with this frame and with those that `flush` writes."""
        self._transport = await self._begin()
        if self._transport is None:
            raise ConnectionResetError("the client has disconnected")
        self._first = frames = [first]
        flush()
        self._first = None
        await self._send_first(b"".join(frames))
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
        transport.write(self._on_the_wire(frame))
        self.wrote_at = self._loop.time()

    @abstractmethod
    async def close(self, last: bytes) -> web.StreamResponse:
        """Write the last frame, and wait until the client keeps up."""

    def cut(self) -> None:
        """Abort the connection, which cancels the handler."""
        if self._transport is not None:
            self._transport.abort()

    @abstractmethod
    async def _begin(self) -> asyncio.Transport | None: ...

    @abstractmethod
    async def _send_first(self, frames: bytes) -> None: ...

    @abstractmethod
    def _on_the_wire(self, frame: bytes) -> bytes: ...


class EventStream(AnswerStream):
    """Server-sent events: the response of one request."""

    def __init__(self, http: web.Request) -> None:
        super().__init__()
        self._http = http
        self._response = _Response(headers=HEADERS)
        self._chunked = http.version >= HttpVersion11

    async def _begin(self) -> asyncio.Transport | None:
        self._http.protocol.keep_alive(True)  # ends its timer; the next one follows the answer
        await self._response.prepare(self._http)
        return self._http.transport

    async def _send_first(self, frames: bytes) -> None:
        await self._response.write(frames)
        self._response.headers.clear()  # they are sent

    def _on_the_wire(self, frame: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(frame), frame) if self._chunked else frame

    async def close(self, last: bytes) -> web.StreamResponse:
        await self._response.write_eof(last)
        return self._response


class StreamSupervisor:
    """Sends keep-alives on all open streams, resumes slow readers and disconnects blocked ones."""

    def __init__(self, keepalive_s: float, slow_reader_s: float) -> None:
        self._keepalive_s = keepalive_s
        self.slow_reader_s = slow_reader_s
        self._streams: dict[AnswerStream, tuple[bytes, Callable[[], None]]] = {}
        self._any = asyncio.Event()

    def add(self, stream: AnswerStream, keepalive: bytes, resume: Callable[[], None]) -> None:
        """Supervise a stream; `resume` is called when a blocked reader has caught up."""
        self._streams[stream] = (keepalive, resume)
        self._any.set()

    def remove(self, stream: AnswerStream) -> None:
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
        self, stream: AnswerStream, keepalive: bytes, resume: Callable[[], None], now: float
    ) -> None:
        since = stream.blocked_since
        if since is not None:
            if stream.writable:
                # lanes of one WebSocket share its buffer: each is the first one in turn
                self._streams[stream] = self._streams.pop(stream)
                resume()
            elif now - since > self.slow_reader_s:
                log.warning("disconnecting a client that has not read for %.0f s", now - since)
                stream.cut()
        elif stream.is_open and now - stream.wrote_at > self._keepalive_s and stream.writable:
            stream.write(keepalive)
