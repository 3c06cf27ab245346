"""A small HTTP endpoint for services that have no API of their own: /metrics, /health, /live."""

import os
from collections.abc import Callable

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvmesh.runtime.service import StartError


def render_metrics(_: web.Request) -> web.Response:
    """This process's metrics in the Prometheus text format."""
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def serve_metrics(host: str, port: int, ready: Callable[[], bool]) -> web.AppRunner | None:
    """Listen on `host` at `port`, unless that is 0; `/health` is 503 until `ready()`.

    Raises StartError if the port cannot be had.
    """
    if not port:
        return None

    async def metrics(request: web.Request) -> web.Response:
        return render_metrics(request)

    async def health(_: web.Request) -> web.Response:
        ok = ready()
        return web.json_response({"status": "ok" if ok else "starting"}, status=200 if ok else 503)

    async def live(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/health", health), web.get("/live", live)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartError(f"cannot serve metrics on {host} port {port}: {reason}") from error
    return runner
