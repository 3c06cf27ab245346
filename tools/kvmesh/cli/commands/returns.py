"""`kvmesh returns`: shows after how long sessions return, and which agents rest."""

import argparse
import sys

from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh returns [options]"
    parser.epilog = (
        "Shares are of the prompts that ended in the class, read again within a time after their "
        "end. `expected` are the returns that forecasts made before them."
    )
    parser.add_argument("--model", metavar="M", help="only this model [all]")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    import msgspec
    from rich.text import Text

    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.returns import agent_lines, check_lines, learned_returns, render
    from kvmesh.cli.units import literal_lines
    from kvmesh.returns.rates import BINS, unpack_rates
    from kvmesh.terminal.console import stdout_console

    async def main(bus: Bus) -> int:
        report = await learned_returns(bus, settings)
        if report is None:
            print("kvmesh returns: no router replies", file=sys.stderr)
            return 1
        shown = [each for each in report.classes if arguments.model in (None, each.model)]
        checks = [each for each in report.checks if arguments.model in (None, each.model)]
        agents = [each for each in report.agents if arguments.model in (None, each.model)]
        if arguments.json:
            classes = [
                msgspec.structs.asdict(each) | {"rates": unpack_rates(each.rates)}
                for each in shown
                if len(each.rates) == BINS
            ]
            content = {"classes": classes, "checks": checks, "agents": agents}
            print(msgspec.json.encode(content).decode())
            return 0
        console = stdout_console()
        if shown:
            render(shown).show(console)
            console.print(Text(), literal_lines(check_lines(checks)), sep="\n")
        else:
            print("no prompt has ended yet")
        console.print(literal_lines(agent_lines(agents)))
        return 0

    return run_on_bus("returns", settings, main)
