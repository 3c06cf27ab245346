"""HTTP server whose protocol errors are answered and logged like errors of requests."""

import logging
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from kvmesh.frontend.apis import openai
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.bodies import error_response
from kvmesh.frontend.http.request_id import headers_of, id_of
from kvmesh.runtime.service import StartError
from kvmesh.settings.schema import FrontendSettings

log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """One client's connection; malformed requests are logged in one line without a traceback."""

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

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log, except the error of aiohttp while it drains a body that was already refused."""
        if not isinstance(kwargs.get("exc_info"), RequestPayloadError):
            super().log_exception(*args, **kwargs)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application on `Connection`s."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
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
