"""`kvmesh status`: shows instances, streams and buckets of the mesh."""

import argparse

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--starts", action="store_true", help="show the phases of each worker's start"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.status.report import gather
    from kvmesh.cli.status.view import show_json, show_tables

    async def main(bus: Bus) -> int:
        report = await gather(bus, settings)
        if arguments.json:
            show_json(report)
        else:
            show_tables(report, arguments.starts)
        return 0

    return run_on_bus("status", settings, main)
