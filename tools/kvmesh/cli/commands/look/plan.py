"""`kvmesh plan`: shows the planner's plan and history, and changes its settings."""

import argparse
from collections.abc import Callable

from kvmesh.cli.flags import FlagParser, add_flags
from kvmesh.cli.planning import backtest, fit, profiles, show, size
from kvmesh.cli.planning import set as set_action
from kvmesh.cli.registry import NOT_SIMULATED
from kvmesh.settings import Settings

Action = Callable[[argparse.Namespace, Settings], int]
ACTIONS = {
    "backtest": backtest,
    "fit": fit,
    "profiles": profiles,
    "set": set_action,
    "size": size,
}
SECTIONS = {"profiles": (), "size": ("router", "mock", "nats", "log")}  # others: the bus's


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh plan [ACTION …] [options]"
    parser.set_defaults(perform=show.run)
    show.configure(parser)
    add_flags(parser, "", ("nats", "log"))
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=FlagParser)
    for name, module in ACTIONS.items():
        added = actions.add_parser(name, help=module.HELP, prog=f"kvmesh plan {name}")
        added.set_defaults(perform=module.run)
        module.configure(added)
        add_flags(added, "", SECTIONS.get(name, ("nats", "log")), NOT_SIMULATED)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    perform: Action = arguments.perform
    return perform(arguments, settings)
