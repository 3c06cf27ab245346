"""`kvmesh explain --slow`: finds and prints the slowest requests of a window."""

import argparse
from datetime import UTC, datetime, timedelta

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.outcomes.slow import SlowestRequests, render
from kvmesh.observer.route_stream import each_outcome
from kvmesh.runtime.quantities import counted
from kvmesh.settings import Settings
from kvmesh.terminal.console import stdout_console

WINDOW = timedelta(minutes=10)


def show_slow(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print them; without `--since` of the last ten minutes. Return the exit status."""
    since = arguments.since or datetime.now(UTC) - WINDOW

    async def main(bus: Bus) -> int:
        requests = SlowestRequests(arguments.limit, arguments.slow)
        await each_outcome(bus, since, requests.add)
        if arguments.json:
            for request in requests.slowest():
                print(msgspec.json.encode(request).decode())
            return 0
        console = stdout_console()
        render(requests.slowest()).show(console)
        total = counted(requests.added, "request")
        console.print(f"[dim]of {total} since {since.astimezone():%H:%M:%S}[/dim]")
        return 0

    return run_on_bus("explain", settings, main)
