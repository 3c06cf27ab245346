"""`kvmesh adapter`: loads, unloads and lists the LoRA adapters of running workers."""

import argparse
import asyncio
import os
import sys

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.compatibility import Compatibility
from kvmesh.bus.messages import (
    AdapterCommand,
    Instance,
    LoadAdapter,
    UnloadAdapter,
    adapter_name,
)
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.workers import WorkerChoiceError, chosen_workers, send_command
from kvmesh.settings import Settings

ARGUMENTS = {"load": 2, "unload": 1, "list": 0}
TIMEOUT_S = 60.0
SPARE_S = 5.0  # for the reply, and for a worker to give up by itself


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh adapter load NAME FOLDER | unload NAME | list [options]"
    parser.epilog = (
        "Workers read FOLDER on their own machines. Loading replaces an adapter of the same name."
        " A restarted worker has only the adapters of its settings."
    )
    parser.add_argument("action", choices=ARGUMENTS, metavar="ACTION", help=", ".join(ARGUMENTS))
    parser.add_argument(
        "operands", nargs="*", metavar="NAME FOLDER", help="the adapter's name and PEFT folder"
    )
    parser.add_argument("--model", metavar="M", help="its model [default the only one served]")
    parser.add_argument("--worker", metavar="W", help="name or instance of one worker [all]")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"longest time to load, or to wait for the adapter's requests [{TIMEOUT_S:g}]",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    action, operands = arguments.action, arguments.operands
    reason = _problem(action, operands, arguments.timeout_s)
    if reason:
        print(f"kvmesh adapter: {reason}", file=sys.stderr)
        return 2

    async def main(bus: Bus) -> int:
        try:
            workers = await chosen_workers(bus, settings, arguments.model, arguments.worker)
            if action == "list":
                _list(workers)
                return 0
            _require_one_model(workers)
        except WorkerChoiceError as error:
            print(f"kvmesh adapter: {error}", file=sys.stderr)
            return 1
        command = _command(action, operands, arguments.timeout_s)
        done = await asyncio.gather(*(_send(bus, card, command) for card in workers))
        return 0 if all(done) else 1

    return run_on_bus("adapter", settings, main)


def _problem(action: str, operands: list[str], timeout_s: float) -> str:
    """The reason why the arguments are invalid; empty if they are valid."""
    if len(operands) != ARGUMENTS[action]:
        takes = {0: "no operands", 1: "NAME", 2: "NAME FOLDER"}[ARGUMENTS[action]]
        return f"{action} takes {takes}"
    if not 0 < timeout_s <= 86400:
        return f"--timeout-s {timeout_s:g} must be above 0 and at most 86400"
    return ""


def _command(action: str, operands: list[str], timeout_s: float) -> AdapterCommand:
    if action == "load":
        folder = os.path.abspath(operands[1])
        return LoadAdapter(name=operands[0], folder=folder, timeout_s=timeout_s)
    return UnloadAdapter(name=operands[0], timeout_s=timeout_s)


def _require_one_model(workers: list[Instance]) -> None:
    served = sorted({card.model.name for card in workers if card.model is not None})
    if len(served) > 1:
        raise WorkerChoiceError(f"the mesh serves {', '.join(served)}: name one with --model")


async def _send(bus: Bus, card: Instance, command: AdapterCommand) -> bool:
    """Send a command to one worker and print its reply; False if it failed."""
    reply = await send_command(bus, card, command, command.timeout_s + SPARE_S)
    if reply.ok:
        verb = "loaded" if isinstance(command, LoadAdapter) else "unloaded"
        print(f"{card.name}: {verb} {reply.adapter}")
    else:
        print(f"{card.name}: {reply.reason}", file=sys.stderr)
    return reply.ok


def _list(workers: list[Instance]) -> None:
    """Print each adapter with its workers; the mark is on the one that serves new requests."""
    lines = []
    for model in sorted({card.model.name for card in workers if card.model is not None}):
        group = Compatibility()
        for card in workers:
            if card.model is not None and card.model.name == model:
                group.join(card)
        holders: dict[str, list[str]] = {}
        serving: dict[str, str] = {}
        for card in group.fitting:
            for identity in card.model.adapters if card.model is not None else ():
                holders.setdefault(identity, []).append(card.name)
                if not card.draining and card.serves != "prefill":
                    serving.setdefault(adapter_name(identity), identity)
        for identity in sorted(holders):
            state = "serves" if identity in serving.values() else "replaced"
            names = ", ".join(sorted(holders[identity]))
            lines.append(f"{model}: {identity} {state} on {names}")
    print("\n".join(lines) or "no adapters")
