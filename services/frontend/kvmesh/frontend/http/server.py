"""HTTP server whose protocol errors are answered like errors of requests."""

from asyncio.trsock import TransportSocket

from aiohttp import web

from kvmesh.frontend.apis import openai
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.bodies import error_response
from kvmesh.frontend.http.request_id import headers_of, id_of
from kvmesh.runtime.http.connection import Connection, RefusingRunner
from kvmesh.runtime.service import StartError
from kvmesh.settings.schema import FrontendSettings

BACKLOG = 4096  # connections that wait to be accepted: a late process resets none of them


class ApiConnection(Connection):
    """A connection whose malformed requests are answered in the shape of the OpenAI API."""

    def malformed(self, request: web.BaseRequest, reason: str) -> web.StreamResponse:
        response = error_response(
            openai.SHAPE, InvalidRequest(f"Malformed HTTP request: {reason}."), id_of(request)
        )
        response.headers.update(headers_of(request))
        return response


class Runner(RefusingRunner):
    """Runs an application on `ApiConnection`s."""

    connection = ApiConnection

    async def stop_listening(self) -> None:
        """Accept no more connections; those that are open are served on."""
        self.stop_accepting()
        for site in list(self.sites):
            await site.stop()

    @property
    def busy(self) -> bool:
        """True while a connection has a request without a complete response."""
        connections = self.server.connections if self.server is not None else []
        return any(connection._current_request is not None for connection in connections)


async def listen(runner: Runner, settings: FrontendSettings) -> str:
    """Listen on the frontend's port; returns its URL. Raises StartError if it is unavailable."""
    shared = settings.processes > 1 or settings.reuse_port
    site = web.TCPSite(
        runner, settings.host, settings.port, reuse_port=shared or None, backlog=BACKLOG
    )
    try:
        await site.start()
    except OSError as error:
        raise StartError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        ) from error
    listening: list[TransportSocket] = site._server.sockets  # type: ignore[union-attr]
    runner.accept_many([each.fileno() for each in listening])
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
