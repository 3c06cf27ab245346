"""The HTTP server of a frontend that waits for NATS: it answers probes, and 503 to requests."""

import asyncio

from aiohttp import web

from kvmesh.frontend.errors import Unavailable
from kvmesh.frontend.http.bodies import error_response
from kvmesh.frontend.http.error_shape import shape_for
from kvmesh.frontend.http.intake.cors import CrossOrigin
from kvmesh.frontend.http.request_id import add_headers, id_of
from kvmesh.frontend.http.server import Runner, listen
from kvmesh.settings import Settings

CLOSE_S = 1.0
NOT_READY = {"status": "unhealthy", "missing": ["nats"]}


async def answer_without_bus(settings: Settings) -> None:
    """Listen on the frontend's port until cancelled."""
    cross_origin = CrossOrigin(settings.frontend.cors_origins)
    runner = Runner(_application(cross_origin), access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        await listen(runner, settings.frontend)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _application(cross_origin: CrossOrigin) -> web.Application:
    async def unavailable(http: web.Request) -> web.Response:
        if (preflight := cross_origin.preflight(http)) is not None:
            return preflight
        error = Unavailable("The server waits for NATS, which it has not reached yet.")
        return error_response(shape_for(http), error, id_of(http))

    app = web.Application()
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(cross_origin.add_headers)
    app.add_routes(
        [
            web.get("/health", _health),
            web.get("/live", _live),
            web.route("*", "/{path:.*}", unavailable),
        ]
    )
    return app


async def _health(_: web.Request) -> web.Response:
    return web.json_response(NOT_READY, status=503)


async def _live(_: web.Request) -> web.Response:
    return web.json_response({"status": "live"})
