"""`kvmesh promote`: has a parked worker finish its start and serve."""

import argparse
import asyncio
import sys

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Instance, Promote, Role
from kvmesh.cli.arguments import seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.workers import WorkerChoiceError, chosen_workers, command_workers
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

REPLY_S = 5.0
POLL_S = 0.1


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
        missing = await _until_serving(bus, settings, workers, arguments.wait)
        if missing:
            text = f"does not serve after {arguments.wait:g} s: {', '.join(sorted(missing))}"
            print(f"kvmesh promote: {text}", file=sys.stderr)
        return 1 if missing else 0

    return run_on_bus("promote", settings, main)


async def _until_serving(
    bus: Bus, settings: Settings, workers: list[Instance], timeout_s: float
) -> set[str]:
    """Print each worker that serves; returns the instances that do not after `timeout_s` s."""
    missing = {card.instance for card in workers}
    directory = Directory(bus, stream_limits(settings.streams), role=Role.WORKER)
    await directory.open()
    try:
        async with asyncio.timeout(timeout_s):
            while missing:
                for card in directory.instances:
                    if card.instance in missing:
                        missing.remove(card.instance)
                        print(f"{card.instance}: serves after {card.promoted_s:.1f} s")
                if missing:
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        pass
    finally:
        await directory.close()
    return missing
