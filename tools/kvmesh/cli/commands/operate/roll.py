"""`kvmesh fleet roll`: replaces the processes of a service one at a time."""

import argparse

from kvmesh.bus.client import Bus
from kvmesh.cli.arguments import seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.rolling.platforms import (
    ComposeContainers,
    Platform,
    StatefulSetPods,
    SupervisedProcesses,
    caller,
)
from kvmesh.cli.rolling.run import RollCommand
from kvmesh.settings import Settings

SERVICES = ("frontend", "router", "indexer", "worker", "kvbm", "planner")
WATCH_S, TIMEOUT_S, TOLERANCE = 5.0, 1800.0, 100.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh fleet roll SERVICE [options]"
    parser.epilog = (
        "Each process finishes its requests, leaves, and is replaced; the next one follows once its"
        " successor serves and requests fare no worse than before. A roll that was interrupted or"
        " has stopped goes on with the same command."
    )
    parser.add_argument("service", choices=SERVICES, metavar="SERVICE", help=", ".join(SERVICES))
    parser.add_argument(
        "--to",
        default="",
        metavar="VERSION",
        help="roll to another version: under kvmesh up the environment, or its python, of another"
        " installation on its machine; the image of a StatefulSet",
    )
    parser.add_argument(
        "--watch",
        type=seconds,
        default=WATCH_S,
        metavar="S",
        help=f"seconds of requests to compare after each process [{WATCH_S:g}]",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="PERCENT",
        help="by how much the p90 of first tokens may rise: replaced workers have empty caches"
        f" [{TOLERANCE:g}]",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="S",
        help=f"seconds for a process to leave and its successor to serve [{TIMEOUT_S:g}]",
    )
    parser.add_argument(
        "--afresh", action="store_true", help="begin anew where a roll has not ended"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--statefulset",
        metavar="[NAMESPACE/]NAME",
        help="the service is this StatefulSet, reached by kubectl",
    )
    place.add_argument(
        "--compose", metavar="FILE", help="the service is one of this Compose file, of its name"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    async def main(bus: Bus) -> int:
        command = RollCommand(
            bus,
            settings,
            arguments.service,
            _platform(arguments, bus),
            arguments.watch,
            arguments.timeout,
            arguments.tolerance / 100,
        )
        return await command.run(arguments.to, arguments.afresh)

    return run_on_bus("fleet roll", settings, main)


def _platform(arguments: argparse.Namespace, bus: Bus) -> Platform:
    if arguments.compose:
        return ComposeContainers(arguments.compose, arguments.service)
    if arguments.statefulset:
        namespace, _, name = arguments.statefulset.rpartition("/")
        return StatefulSetPods(name, namespace)
    return SupervisedProcesses(bus, caller())
