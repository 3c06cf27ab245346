"""`kvmesh top`: the workers, sessions and tenants of a mesh, live in a terminal."""

import argparse
import sys
from datetime import UTC, datetime, timedelta

from kvmesh.cli.arguments import add_since, failed
from kvmesh.settings import Settings

WINDOW = timedelta(minutes=5)
VIEWS = ("fleet", "sessions", "tenants", "caches")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Keys: 1 fleet, 2 sessions, 3 tenants, s sort by the next column, r reverse, p pause, "
        "? help, q quit. Sessions and tenants count the requests that ended in the window."
    )
    parser.add_argument(
        "--view", choices=VIEWS, default="fleet", help="the first view [default fleet]"
    )
    parser.add_argument(
        "--sort", metavar="COLUMN", help="a column of the view, by its name in --json"
    )
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    add_since(parser, "length of the window of requests: 90s, 5m, 2h, 1d [default 5m]")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--json", action="store_true", help="with --once: as one JSON object")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.flags import did_you_mean
    from kvmesh.cli.top.controls import TopControls
    from kvmesh.cli.top.monitor import TopMonitor, show_live, show_once
    from kvmesh.observer import columns

    view = columns.VIEWS[arguments.view]
    sort = arguments.sort or view.sort
    column = view.column(sort)
    if column is None:
        names = [column.name for column in view.columns]
        hint = did_you_mean(sort, names)
        return _usage(f"{view.name} has no column {sort}{hint}; it has {', '.join(names)}")
    if arguments.json and not arguments.once:
        return _usage("--json needs --once")
    if not arguments.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _usage("this is no terminal; --once prints one frame")
    falling = column.number if arguments.sort else view.reverse
    controls = TopControls(view, sort, falling != arguments.reverse)
    now = datetime.now(UTC)
    window_s = max(1.0, (now - (arguments.since or now - WINDOW)).total_seconds())

    async def main(bus: Bus) -> int:
        monitor = TopMonitor(bus, settings, window_s)
        if arguments.once:
            await show_once(monitor, controls, arguments.json)
        else:
            await show_live(monitor, controls)
        return 0

    return run_on_bus("top", settings, main)


def _usage(reason: str) -> int:
    return failed("top", reason, 2)
