"""HTTP server that neither parses nor awaits for long what it has refused."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import ERROR

log = logging.getLogger(__name__)
MAX_RECEIVED = 64 << 10  # bytes of a body that nobody reads, for which a connection is kept
MAX_DISCARDED = 64 << 20
DISCARD_S = 5.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE)
TELL_S = 60.0  # between lines of the log about connections that cannot be accepted
MOST_ACCEPTED = 64  # connections in a pass of the loop, beside the loop's own

# A client that ends its side so soon behind a request has no other one; an interim answer, which
# such clients may not expect, waits. Later ends are mostly those of clients that leave.
SOON_S = 0.2
PATIENCE_S = 1.0
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S, PROBES_S = 0.02, 5.0  # between the first two, and ten times as long each time up to this
TCP_CLOSE = 7  # of Linux: the state of a connection that the client has reset


class _Queue(list[Any]):
    """The requests of a connection that wait, nearly always none: a deque takes ten times more."""

    __slots__ = ()

    def popleft(self) -> Any:
        return self.pop(0)


class Connection(web.RequestHandler):
    """One client's connection.

    Bodies arrive as they were sent: endpoints decode those that they read. What is left of another
    one is discarded and never parsed. Malformed requests are logged in one line without a
    traceback.

    A client that has *ended* its side, as `nc -N` does behind a request, gets its answers. One that
    has left ends its side, too, but the kernel then refuses what it is sent: an interim answer
    tells, and of an answer that has begun, its next parts. A late end of which no interim answer
    can tell is that of a client that has left, as of a proxy that speaks HTTP/1.0.
    """

    _ended = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._messages = _Queue()  # type: ignore[assignment]
        self._received_at = 0.0

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that waits for an answer."""
        if self._ended:  # uvloop may say so again
            return True
        idle = not self._request_count or (self._waiter is not None and not self._waiter.done())
        if idle or self._upgraded or self._parser is None:
            return False
        try:
            self._parser.feed_eof()
        except HttpProcessingError:  # the rest of a body will not come
            return False
        late = self._loop.time() - self._received_at > SOON_S
        if late and not self._awaits_head:
            return False
        self._ended, self._close = True, not self._messages
        self._loop.call_later(PROBE_S if late else PATIENCE_S, self._probe, PROBE_S)
        return True

    @property
    def _awaits_head(self) -> bool:
        """True before an answer has begun, to a client that skips interim ones (HTTP/1.1)."""
        request = self._current_request
        return (
            request is not None
            and request.version >= HttpVersion11
            and not request.writer.output_size
        )

    def _probe(self, after: float) -> None:
        """Abort the connection if the client has reset it, else find that out later.

        A relay that passes on the end of a client's side notices at the second answer that it left.
        """
        transport = self.transport
        if self._current_request is None or transport is None or transport.is_closing():
            return
        found = transport.get_extra_info("socket")
        if found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            transport.abort()
            return
        if self._awaits_head:
            transport.write(PROBE)
        self._loop.call_later(after, self._probe, min(10 * after, PROBES_S))

    def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> Coroutine[Any, Any, tuple[web.StreamResponse, bool]]:
        """Send the rest of the response, and end the connection if the body is still to come."""
        if self._ended and not self._messages:
            resp.force_close()
        finished = super().finish_response(request, resp, start_time)
        if (request.content.is_eof() and request.method != ERROR.method) or _is_short(request):
            return finished
        resp.force_close()
        return self._end(finished)

    async def _end(
        self, finished: Coroutine[Any, Any, tuple[web.StreamResponse, bool]]
    ) -> tuple[web.StreamResponse, bool]:
        """Close the connection once the client has had the time to read its answer."""
        sent = await finished
        if self.transport is not None and not self.transport.is_closing():
            await _Discard(self, self.transport).until_end()
        self.force_close()
        return sent

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            raise exc  # the client has disconnected
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        reason = (message or type(exc).__name__).partition("\n")[0].rstrip(":. ")
        log.info("malformed HTTP request from %s: %s", request.remote, reason)
        response = self.malformed(request, reason)
        response.force_close()
        return response

    def malformed(self, request: web.BaseRequest, reason: str) -> web.StreamResponse:
        """The answer to a request that is none."""
        return web.Response(status=400, text=f"Malformed HTTP request: {reason}.\n")


class _Discard(asyncio.Protocol):
    """Discards what a client still sends after its answer.

    To close at once would reset the connection, and many clients read only once they have sent.
    """

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._left = MAX_DISCARDED
        self._end = asyncio.Event()
        transport.set_protocol(self)
        transport.write_eof()
        transport.resume_reading()

    async def until_end(self) -> None:
        """Wait until the client closes, or a bound is reached."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                await self._end.wait()

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            self._end.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.set()
        self._connection.connection_lost(exc)


def _is_short(request: web.BaseRequest) -> bool:
    """True if the body costs little to receive, and will come, so that the connection may stay."""
    length = request.content_length or MAX_RECEIVED + 1
    invited = hdrs.EXPECT not in request.headers
    return length <= MAX_RECEIVED and invited and request.content.exception() is None


class _Server(web.Server):
    connection: type[Connection] = Connection
    acceptor: "Acceptor | None" = None

    def __call__(self) -> web.RequestHandler:
        return self.connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self.acceptor is not None:
            self.acceptor.look()


class Acceptor:
    """Accepts the connections that wait at listening sockets, MOST_ACCEPTED in a pass of the loop.

    uvloop accepts one in a pass, which takes milliseconds while many requests begin: a connection
    behind hundreds would wait for as many passes, whoever it is of.
    """

    def __init__(self, server: web.Server, listening: Sequence[int]) -> None:
        self._server = server
        self._sockets = [socket.socket(fileno=os.dup(number)) for number in listening]
        self._planned = False
        self._making: set[asyncio.Task[object]] = set()
        self._tells_from = 0.0

    def look(self) -> None:
        """Accept those that wait, if any, in the next pass."""
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._accept)

    def _accept(self) -> None:
        self._planned = False
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            for _ in range(MOST_ACCEPTED):
                try:
                    accepted, _address = listening.accept()
                except OSError as error:  # none waits, or none can be accepted
                    if error.errno in EXHAUSTED:
                        self._tell(error)
                    break
                accepted.setblocking(False)
                task = loop.create_task(self._serve(accepted))
                self._making.add(task)
                task.add_done_callback(self._making.discard)

    def _tell(self, error: OSError) -> None:
        """Log why the loop closes the connections that wait, which it does without a word."""
        now = asyncio.get_running_loop().time()
        if now < self._tells_from:
            return
        self._tells_from = now + TELL_S
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = "new connections are closed: %s; this process may open %d files, raise its limit"
        log.error(f"{text} (ulimit -n, LimitNOFILE)", error.strerror, limit)

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._server, accepted)
        except OSError as error:  # its client is gone already
            accepted.close()
            log.debug("a connection ended as it was accepted: %s", error)

    def close(self) -> None:
        """Listen no more."""
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()


class RefusingRunner(web.AppRunner):
    """Runs an application on connections of the type `connection`."""

    connection: type[Connection] = Connection
    _acceptor: Acceptor | None = None

    def accept_many(self, listening: Sequence[int]) -> None:
        """Accept connections at listening sockets, by their numbers, faster than the loop does."""
        assert isinstance(self.server, _Server)
        self._acceptor = self.server.acceptor = Acceptor(self.server, listening)

    def stop_accepting(self) -> None:
        """Listen no more, but for the loop itself."""
        if self._acceptor is not None:
            self._acceptor.close()

    async def cleanup(self) -> None:
        self.stop_accepting()
        await super().cleanup()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            auto_decompress=False,
            lingering_time=DISCARD_S,
            **made._kwargs,
        )
        server.connection = self.connection
        return server
