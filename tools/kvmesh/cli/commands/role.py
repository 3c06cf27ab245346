"""`kvmesh role`: changes what a running worker serves."""

import argparse
import asyncio
import sys

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Instance, Serve
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.workers import WorkerChoiceError, chosen_workers, send_command
from kvmesh.settings import Settings

ROLES = ("aggregated", "prefill", "decode")
TIMEOUT_S = 20.0  # more than a worker takes to reply


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh role WORKER ROLE [options]"
    parser.epilog = (
        "Requests that run end where they are. A restarted worker has the role of its settings."
    )
    parser.add_argument("worker", metavar="WORKER", help="its name or instance")
    parser.add_argument("role", choices=ROLES, metavar="ROLE", help=", ".join(ROLES))
    parser.add_argument("--model", metavar="M", help="its model [any]")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    command = Serve(serves=arguments.role)

    async def main(bus: Bus) -> int:
        try:
            workers = await chosen_workers(bus, settings, arguments.model, arguments.worker)
        except WorkerChoiceError as error:
            print(f"kvmesh role: {error}", file=sys.stderr)
            return 1
        done = await asyncio.gather(*(_send(bus, card, command) for card in workers))
        return 0 if all(done) else 1

    return run_on_bus("role", settings, main)


async def _send(bus: Bus, card: Instance, command: Serve) -> bool:
    """Send the command to one worker and print its reply; False if it failed."""
    reply = await send_command(bus, card, command, TIMEOUT_S)
    if reply.ok:
        print(f"{card.name}: serves {command.serves}, before {card.serves}")
    else:
        print(f"{card.name}: {reply.reason}", file=sys.stderr)
    return reply.ok
