"""`kvmesh explain --session`: prints the turns of a session, and where its cached tokens went."""

import argparse
import sys

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from kvmesh.bus.client import Bus
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.outcomes.session import SessionTurns
from kvmesh.cli.units import literal_lines
from kvmesh.frontend.namespaces import own_name
from kvmesh.observer.route_stream import each_outcome
from kvmesh.settings import Settings

WIDTH = 240


def show_session(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print them. Return the exit status."""

    async def main(bus: Bus) -> int:
        turns = SessionTurns(arguments.session, arguments.limit)
        await each_outcome(bus, arguments.since, turns.add)
        if not turns.count:
            print(f"kvmesh explain: no request of session {arguments.session}", file=sys.stderr)
            return 1
        if arguments.json:
            for outcome in turns.turns:
                shown = replace(outcome, session=own_name(outcome.session))
                print(msgspec.json.encode(shown).decode())
            return 0
        console = Console(highlight=False)
        wide = console if console.is_terminal else Console(highlight=False, width=WIDTH)
        wide.print(turns.table(), Text(), literal_lines(turns.summary()), sep="\n")
        return 0

    return run_on_bus("explain", settings, main)
