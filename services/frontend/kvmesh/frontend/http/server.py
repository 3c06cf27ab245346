"""HTTP server whose protocol errors are answered and logged like errors of requests."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from aiohttp import hdrs, web
from aiohttp.web_protocol import ERROR

from kvmesh.frontend.apis import openai
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.bodies import error_response
from kvmesh.frontend.http.request_id import headers_of, id_of
from kvmesh.runtime.service import StartError
from kvmesh.settings.schema import FrontendSettings

log = logging.getLogger(__name__)
MAX_RECEIVED = 64 << 10  # bytes of a body that nobody reads, for which a connection is kept
MAX_DISCARDED = 64 << 20
DISCARD_S = 5.0


class Connection(web.RequestHandler):
    """One client's connection.

    Bodies arrive as they were sent: endpoints decode those that they read. What is left of another
    one is discarded and never parsed. Malformed requests are logged in one line without a
    traceback.
    """

    def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> Coroutine[Any, Any, tuple[web.StreamResponse, bool]]:
        """Send the rest of the response, and end the connection if the body is still to come."""
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
        response = error_response(
            openai.SHAPE, InvalidRequest(f"Malformed HTTP request: {reason}."), id_of(request)
        )
        response.headers.update(headers_of(request))
        response.force_close()
        return response


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
    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application on `Connection`s."""

    async def stop_listening(self) -> None:
        """Accept no more connections; those that are open are served on."""
        for site in list(self.sites):
            await site.stop()

    @property
    def busy(self) -> bool:
        """True while a connection has a request without a complete response."""
        connections = self.server.connections if self.server is not None else []
        return any(connection._current_request is not None for connection in connections)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            auto_decompress=False,
            lingering_time=DISCARD_S,
            **made._kwargs,
        )


async def listen(runner: Runner, settings: FrontendSettings) -> str:
    """Listen on the frontend's port; returns its URL. Raises StartError if it is unavailable."""
    shared = settings.processes > 1 or settings.reuse_port
    site = web.TCPSite(runner, settings.host, settings.port, reuse_port=shared or None)
    try:
        await site.start()
    except OSError as error:
        raise StartError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        ) from error
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
