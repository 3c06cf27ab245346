"""`kvmesh up`: runs and supervises a whole mesh on this machine."""

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack

from msgspec.structs import replace

from kvmesh.cli.arguments import failed
from kvmesh.cli.supervisor.console import LogForwarder, LogStream
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.forks.server import ServiceForks
from kvmesh.cli.supervisor.forks.services import import_services, run_fork
from kvmesh.cli.supervisor.mesh import SupervisedMesh
from kvmesh.cli.supervisor.nats import server_spec
from kvmesh.cli.supervisor.plan import ProcessSpec, service_specs
from kvmesh.cli.supervisor.resources import claim
from kvmesh.cli.supervisor.startup import StartupGuide
from kvmesh.runtime import logs
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Ctrl-C stops everything in order, a second Ctrl-C at once."


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    settings = _with_installed(settings)
    logs.configure(settings.log, "up")
    forks = ServiceForks.start(lambda: _prepare(settings), run_fork)
    try:
        with ExitStack() as claims:
            if forks is not None:
                claims.callback(forks.close)
            claimed = claim(settings, claims)
            asyncio.run(_supervise(claimed, embedded=not settings.nats.url, forks=forks))
    except UpError as error:
        return failed("up", error)
    return 0


def _prepare(settings: Settings) -> None:
    """Import what the services of the mesh import."""
    specs = service_specs(settings, os.environ)
    import_services(dict.fromkeys(module for spec in specs for module in spec.modules))


def _with_installed(settings: Settings) -> Settings:
    """The settings without the dashboard if its library is not installed."""
    if not settings.up.dashboard or importlib.util.find_spec("nicegui") is not None:
        return settings
    print("kvmesh up: no dashboard: pip install 'kvmesh[dashboard]'", file=sys.stderr)
    return replace(settings, up=replace(settings.up, dashboard=False))


async def _supervise(settings: Settings, embedded: bool, forks: ServiceForks | None) -> None:
    specs = service_specs(settings, os.environ)
    if embedded:
        specs.insert(0, server_spec(settings, os.environ))
    if not sys.stdout.isatty() or settings.log.format == "json":
        await _mesh(settings, specs, forks, _print)[0].run()
        return
    from kvmesh.cli.supervisor.table import LiveTable

    table = LiveTable()
    mesh, guide = _mesh(settings, specs, forks, table.emit)
    showing = asyncio.create_task(table.show(mesh.processes, guide))
    try:
        await mesh.run()
    finally:
        showing.cancel()
        await asyncio.wait({showing})


def _mesh(
    settings: Settings,
    specs: list[ProcessSpec],
    forks: ServiceForks | None,
    emit: Callable[[str], None],
) -> tuple[SupervisedMesh, StartupGuide]:
    width = max(len(spec.name) for spec in specs)
    log = LogStream(emit, width, settings.log.format == "json", sys.stdout.isatty())
    logging.getLogger().handlers[:] = [LogForwarder(log)]
    guide = StartupGuide(settings, specs, log)
    return SupervisedMesh(specs, guide, log, settings.up.stop_timeout_s, forks), guide


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # no reader: shut down as on a signal
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        os.kill(os.getpid(), signal.SIGTERM)
