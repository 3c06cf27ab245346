"""HTTP endpoint of services that serve no API: /metrics, /health, /live."""

import os
from collections.abc import Callable, Iterator
from math import isfinite

from aiohttp import web
from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from kvmesh.runtime.http.connection import RefusingRunner
from kvmesh.runtime.service import StartError
from kvmesh.runtime.warnings import Warnings
from kvmesh.settings.schema import ProcessSettings

disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` doubles the series of counters


class _FiniteGauges:
    """The registry's metrics without gauges that have no value now.

    Readers warn of `+Inf` and `NaN`, or drop the whole family.
    """

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if metric.type == "gauge":
                metric.samples = [sample for sample in metric.samples if isfinite(sample.value)]
            yield metric


def render_metrics(http: web.Request) -> web.Response:
    """This process's metrics in the Prometheus text format, or in OpenMetrics if preferred.

    Only OpenMetrics carries exemplars.
    """
    encode, content_type = choose_encoder(http.headers.get("Accept", ""))
    body = encode(_FiniteGauges())
    return web.Response(body=body, headers={"Content-Type": content_type})


def with_warnings(health: dict[str, object], warnings: Warnings) -> dict[str, object]:
    """The body of /health, extended by the current warnings."""
    return {**health, "warnings": warnings.texts} if warnings.texts else health


async def serve_metrics(
    process: ProcessSettings,
    port: int,
    ready: Callable[[], bool],
    warnings: Warnings,
    standby: Callable[[], str] = lambda: "",
) -> web.AppRunner | None:
    """Listen on the address of `process`, unless the port is 0; `/health` is 503 until `ready()`
    and while the NATS server refuses a subject.

    A process on `standby` does what it should, too; the text is its status then. Raises StartError
    if the port is unavailable.
    """
    host = process.metrics_host
    if not port:
        return None

    async def metrics(request: web.Request) -> web.Response:
        return render_metrics(request)

    async def health(_: web.Request) -> web.Response:
        waits = standby()
        ok = (bool(waits) or ready()) and not warnings.refused
        state = "refused" if warnings.refused else waits or ("ok" if ok else "starting")
        body = with_warnings({"status": state}, warnings)
        return web.json_response(body, status=200 if ok else 503)

    async def live(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/health", health), web.get("/live", live)]
    )
    runner = RefusingRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StartError(f"cannot serve metrics on {host} port {port}: {reason}") from error
    return runner
