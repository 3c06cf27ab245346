"""`kvmesh sleep`: has a worker finish its requests, free its device and wait."""

import argparse
import sys

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Instance, Role, Sleep
from kvmesh.cli.arguments import seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.workers import (
    WorkerChoiceError,
    await_role,
    chosen_workers,
    command_workers,
    model_of,
)
from kvmesh.settings import Settings

REPLY_S = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh sleep WORKER [options]"
    parser.epilog = (
        "The worker accepts nothing new, finishes its requests within its "
        "worker.drain_timeout_s, frees its device and waits; `kvmesh promote` wakes it."
    )
    parser.add_argument("worker", metavar="WORKER", help="its name or instance")
    parser.add_argument("--model", metavar="M", help="its model [any]")
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="S",
        help="wait for up to S seconds until it sleeps; exit status 1 if it does not",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    async def main(bus: Bus) -> int:
        try:
            workers = await chosen_workers(bus, settings, arguments.model, arguments.worker)
            await _warn_of_last(bus, settings, workers)
        except WorkerChoiceError as error:
            print(f"kvmesh sleep: {error}", file=sys.stderr)
            return 1
        if not await command_workers(bus, workers, Sleep(), REPLY_S, "falls asleep"):
            return 1
        if arguments.wait is None:
            return 0
        awake = await await_role(
            bus, settings, workers, Role.PARKED, arguments.wait, lambda _: "asleep"
        )
        if awake:
            text = f"not asleep after {arguments.wait:g} s: {', '.join(sorted(awake))}"
            print(f"kvmesh sleep: {text}", file=sys.stderr)
        return 1 if awake else 0

    return run_on_bus("sleep", settings, main)


async def _warn_of_last(bus: Bus, settings: Settings, workers: list[Instance]) -> None:
    """Say for which models nobody serves once these workers sleep."""
    chosen = {card.instance for card in workers}
    for model in sorted({model_of(card) for card in workers}):
        present = await chosen_workers(bus, settings, model, None)
        if not any(c.instance not in chosen and not c.draining for c in present):
            print(f"kvmesh sleep: no other worker serves {model}", file=sys.stderr)
