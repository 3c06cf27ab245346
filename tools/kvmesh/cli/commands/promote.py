"""`kvmesh promote`: has a parked worker finish its start and serve."""

import argparse
import sys

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Promote, Role
from kvmesh.cli.arguments import seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.workers import WorkerChoiceError, await_role, chosen_workers, command_workers
from kvmesh.settings import Settings

REPLY_S = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh promote WORKER [options]"
    parser.epilog = "The worker takes its device, loads the model and joins the mesh."
    parser.add_argument("worker", metavar="WORKER", help="its name or instance")
    parser.add_argument("--model", metavar="M", help="the model that it will serve [any]")
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="S",
        help="wait for up to S seconds until routers can see it; exit status 1 if they cannot",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    async def main(bus: Bus) -> int:
        try:
            workers = await chosen_workers(
                bus, settings, arguments.model, arguments.worker, (Role.PARKED,)
            )
        except WorkerChoiceError as error:
            print(f"kvmesh promote: {error}", file=sys.stderr)
            return 1
        if not await command_workers(bus, workers, Promote(), REPLY_S, "starts"):
            return 1
        if arguments.wait is None:
            return 0
        missing = await await_role(
            bus,
            settings,
            workers,
            Role.WORKER,
            arguments.wait,
            lambda card: f"serves after {card.promoted_s:.1f} s",
        )
        if missing:
            text = f"does not serve after {arguments.wait:g} s: {', '.join(sorted(missing))}"
            print(f"kvmesh promote: {text}", file=sys.stderr)
        return 1 if missing else 0

    return run_on_bus("promote", settings, main)
