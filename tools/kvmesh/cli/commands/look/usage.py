"""`kvmesh usage`: sums of tokens and GPU time by tenant, key, model or session."""

import argparse
from datetime import UTC, datetime, timedelta

from kvmesh.cli.arguments import add_since, positive
from kvmesh.settings import Settings

ROWS = 50


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Counts each request at its end, from the route stream, which keeps a limited time "
        "(`kvmesh config streams`). GPU time divides the time of a rank's devices equally among "
        "its sequences."
    )
    add_since(parser, "start of the window: 90s, 5m, 2h, 1d ago or a time [default 1h]")
    parser.add_argument(
        "--by",
        type=_dimensions,
        default=["tenant"],
        metavar="LIST",
        help="tenant, key, model or session, or several of them with commas [default tenant]",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=ROWS,
        metavar="N",
        help=f"rows to print; the others are added up in one [default {ROWS}]",
    )
    parser.add_argument("--json", action="store_true", help="print all rows as one JSON object")


def _dimensions(text: str) -> list[str]:
    known = ("tenant", "key", "model", "session")
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    import msgspec

    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.outcomes.usage import UsageTable, render
    from kvmesh.observer.route_stream import each_outcome
    from kvmesh.terminal.console import stdout_console

    since = arguments.since or datetime.now(UTC) - timedelta(hours=1)

    async def main(bus: Bus) -> int:
        table = UsageTable(arguments.by)
        await each_outcome(bus, since, table.add)
        if arguments.json:
            report = {"since": since.timestamp(), "rows": table.rows(), "total": table.total}
            print(msgspec.json.encode(report).decode())
        else:
            render(table, arguments.limit).show(stdout_console())
        return 0

    return run_on_bus("usage", settings, main)
