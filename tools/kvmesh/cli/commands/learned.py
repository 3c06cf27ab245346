"""`kvmesh learned`: shows what each learner of the mesh gained over its fallback."""

import argparse
import sys

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh learned [options]"
    parser.epilog = (
        "Gains are over the fallback, on requests that a learner had not learned from when it was "
        "judged by them. A learner that loses is off until it wins."
    )
    parser.add_argument("--model", metavar="M", help="only this model [all]")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    import msgspec

    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.learned import learned, render
    from kvmesh.terminal.console import stdout_console

    async def main(bus: Bus) -> int:
        found = await learned(bus, settings)
        if found is None:
            print("kvmesh learned: no process replies", file=sys.stderr)
            return 1
        shown = [each for each in found if arguments.model in (None, each.report.model)]
        if arguments.json:
            content = [
                {"process": each.process, **msgspec.structs.asdict(each.report)} for each in shown
            ]
            print(msgspec.json.encode(content).decode())
            return 0
        if not shown:
            print("nothing has been learned yet")
            return 0
        console = stdout_console()
        render(shown).show(console)
        return 0

    return run_on_bus("learned", settings, main)
