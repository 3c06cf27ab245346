"""`kvmesh drain`: has a worker finish its requests and leave."""

import argparse
import asyncio
import sys

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Drain, Role
from kvmesh.cli.arguments import seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.workers import WorkerChoiceError, chosen_workers, command_workers
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

REPLY_S = 5.0
POLL_S = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh drain WORKER [options]"
    parser.epilog = (
        "The worker accepts nothing new, finishes its requests within its "
        "worker.drain_timeout_s, and exits. What started it, such as `kvmesh up` or Kubernetes, "
        "may start it again."
    )
    parser.add_argument("worker", metavar="WORKER", help="its name or instance")
    parser.add_argument("--model", metavar="M", help="its model [any]")
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="S",
        help="wait for up to S seconds until it has left; exit status 1 if it has not",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    async def main(bus: Bus) -> int:
        try:
            workers = await chosen_workers(
                bus, settings, arguments.model, arguments.worker, (Role.WORKER, Role.PARKED)
            )
        except WorkerChoiceError as error:
            print(f"kvmesh drain: {error}", file=sys.stderr)
            return 1
        if not await command_workers(bus, workers, Drain(), REPLY_S, "drains"):
            return 1
        instances = {card.instance for card in workers}
        if arguments.wait is None or await _left(bus, settings, instances, arguments.wait):
            return 0
        print(f"kvmesh drain: still there after {arguments.wait:g} s", file=sys.stderr)
        return 1

    return run_on_bus("drain", settings, main)


async def _left(bus: Bus, settings: Settings, instances: set[str], timeout_s: float) -> bool:
    """True once none of the instances has a lease; False after `timeout_s` seconds."""
    directory = Directory(bus, stream_limits(settings.streams))
    await directory.open()
    try:
        async with asyncio.timeout(timeout_s):
            while any(card.instance in instances for card in directory.instances):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    finally:
        await directory.close()
    return True
