"""`kvmesh plan learned`: shows what learners gained, or the returns that routers learned."""

import argparse

import msgspec

from kvmesh.cli.arguments import failed
from kvmesh.settings import Settings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh plan learned [returns] [options]"
    parser.epilog = (
        "Gains are over the fallback, on requests that a learner had not learned from when it was "
        "judged by them. A learner that loses is off until it wins. `returns` shows after how long "
        "sessions return, by what they wait for, and which agents rest. Its shares are of the "
        "prompts that ended in the class, read again within a time after their end; `expected` "
        "are the returns that forecasts made before them."
    )
    parser.add_argument(
        "subject", nargs="?", choices=("returns",), metavar="returns", help="show learned returns"
    )
    parser.add_argument("--model", metavar="M", help="only this model [all]")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return (_returns if arguments.subject else _learned)(arguments, settings)


def _learned(arguments: argparse.Namespace, settings: Settings) -> int:
    from kvmesh.bus.client import Bus
    from kvmesh.cli.bus_session import run_on_bus
    from kvmesh.cli.learned import learned, render
    from kvmesh.terminal.console import stdout_console

    async def main(bus: Bus) -> int:
        found = await learned(bus, settings)
        if found is None:
            return failed("plan learned", "no process replies")
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

    return run_on_bus("plan learned", settings, main)


def _returns(arguments: argparse.Namespace, settings: Settings) -> int:
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
            return failed("plan learned", "no router replies")
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

    return run_on_bus("plan learned", settings, main)
