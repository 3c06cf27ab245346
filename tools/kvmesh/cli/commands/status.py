"""`kvmesh status`: who and what is on the mesh."""

import argparse

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.report import gather
    from kvmesh.cli.report_view import show_json, show_tables
    from kvmesh.cli.session import run_on_bus

    async def main(bus: Bus) -> int:
        report = await gather(bus, settings)
        (show_json if arguments.json else show_tables)(report)
        return 0

    return run_on_bus("status", settings, main)
