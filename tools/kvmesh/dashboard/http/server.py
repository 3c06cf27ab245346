"""Serves the page with NiceGUI on uvicorn, in the process's own event loop."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from nicegui import Client, ui
from nicegui import app as nicegui_app
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvmesh.dashboard.http.access import Access
from kvmesh.dashboard.http.gate import Gate
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.pages.views import add_pages
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.runtime.http.connection import DISCARD_S, MAX_DISCARDED
from kvmesh.runtime.service import Service, StartError

log = logging.getLogger(__name__)
logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it tells of every connection
BACKLOG = 128
STOP_S = 2
REQUEST_S = 10.0


async def serve(service: Service, mesh: Mesh, keys: Authenticator) -> None:
    """Serve until the service is stopped; raises StartError if the port is unavailable."""
    own = service.settings.dashboard
    listening = _listen(own.host, own.port)
    access = Access(keys, local=not own.allow_anonymous, clock=asyncio.get_running_loop().time)
    app = FastAPI(openapi_url=None)
    nicegui_app.config.socket_io_js_transports = ["websocket"]
    add_pages(mesh, access)
    ui.run_with(
        app,
        title="kvmesh",
        dark=None,
        language="en-US",
        binding_refresh_interval=None,
        tailwind=False,
        message_history_length=20,  # for each viewer
        show_welcome_message=False,
    )
    config = uvicorn.Config(
        Gate(
            app,
            access,
            own.max_viewers,
            lambda: len(Client.instances),
            refuses=lambda: service.warnings.refused,
        ),
        http=PromptConnection,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        ws_max_size=1 << 20,
        ws_max_queue=8,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    host, port = listening.getsockname()[:2]
    log.info("page at http://%s:%d", f"[{host}]" if ":" in host else host, port)
    stopped = asyncio.create_task(service.stopping.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    server.should_exit = True
    await serving


class PromptConnection(HttpToolsProtocol):
    """Closes a connection on which no request's head arrives within REQUEST_S seconds.

    Otherwise a stranger could hold as many as the process may have open. The rest of a body that
    comes after its answer is discarded within bounds and not parsed, and the connection ends.
    """

    _last: RequestResponseCycle | None = None
    _whole = True  # the last request has arrived
    _left: int | None = None  # bytes to discard until the end

    def on_message_begin(self) -> None:
        self._whole = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._whole = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._left is None and not self._whole and self.cycle and self.cycle.response_complete:
            self._end()
        if self._left is None:
            super().data_received(data)
            return
        self._left -= len(data)
        if self._left < 0:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-length: {len(msg)}\r\nconnection: close"
        self.transport.write(f"{head}\r\ncontent-type: text/plain\r\n\r\n{msg}".encode())
        self._end()

    def _end(self) -> None:
        """To close at once would reset the connection, and the client would miss its answer."""
        self._left = MAX_DISCARDED
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # this was the last answer
            cycle.message_event.set()
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(DISCARD_S, self.transport.close)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(REQUEST_S, self._check)

    def _check(self) -> None:
        if self not in self.connections:  # lost, or now a WebSocket
            return
        cycle: RequestResponseCycle | None = self.cycle
        if (cycle is None or cycle.response_complete) and cycle is self._last:
            self.transport.close()
            return
        self._last = cycle
        self.loop.call_later(REQUEST_S, self._check)


class _Server(uvicorn.Server):
    """Leaves signals to the process, which stops the server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises StartError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port} (dashboard.port): {error.strerror}"
        ) from error
    return listening
