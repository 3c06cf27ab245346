"""`kvmesh model adapter`: loads, unloads and lists the LoRA adapters of running workers."""

import argparse
import asyncio
import os
import sys
import time

from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    AdapterCommand,
    AdapterFiles,
    ControlReply,
    Instance,
    LoadAdapter,
    UnloadAdapter,
)
from kvmesh.cli.arguments import failed
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.status.adapter_places import adapter_lines, offered_files
from kvmesh.cli.workers import WorkerChoiceError, chosen_workers, model_of, send_command
from kvmesh.settings import Settings

ARGUMENTS = {"load": (1, 2), "unload": (1, 1), "list": (0, 0)}
TIMEOUT_S = 60.0
SPARE_S = 5.0  # for the reply, and for a worker to give up by itself
OFFER_S = 5.0  # until the card of a worker that has loaded an adapter lists its files
POLL_S = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh model adapter load NAME [FOLDER] | unload NAME | list [options]"
    parser.epilog = (
        "Workers read FOLDER on their own machines. With weights.share, those without it, and all"
        " if none is given, take the files from workers that have them. Loading replaces an adapter"
        " of the same name."
    )
    parser.add_argument("action", choices=ARGUMENTS, metavar="ACTION", help=", ".join(ARGUMENTS))
    parser.add_argument(
        "operands", nargs="*", metavar="NAME FOLDER", help="the adapter's name and PEFT folder"
    )
    parser.add_argument("--model", metavar="M", help="its model [default the only one served]")
    parser.add_argument("--worker", metavar="W", help="name or instance of one worker [all]")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="W",
        help="only this worker reads FOLDER, or has the files; the others take them from it",
    )
    parser.add_argument(
        "--evictable",
        action="store_true",
        help="let it make room for adapters that requests ask for",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"longest time to load, or to wait for the adapter's requests [{TIMEOUT_S:g}]",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    reason = _problem(arguments)
    if reason:
        return failed("model adapter", reason, 2)

    async def main(bus: Bus) -> int:
        command = _Command(bus, settings, arguments)
        try:
            return await command.execute()
        except WorkerChoiceError as error:
            return failed("model adapter", error)

    return run_on_bus("model adapter", settings, main)


def _problem(arguments: argparse.Namespace) -> str:
    """The reason why the arguments are invalid; empty if they are valid."""
    least, most = ARGUMENTS[arguments.action]
    if not least <= len(arguments.operands) <= most:
        takes = {(0, 0): "no operands", (1, 1): "NAME", (1, 2): "NAME [FOLDER]"}[least, most]
        return f"{arguments.action} takes {takes}"
    if not 0 < arguments.timeout_s <= 86400:
        return f"--timeout-s {arguments.timeout_s:g} must be above 0 and at most 86400"
    if arguments.action != "load" and (arguments.source or arguments.evictable):
        return "--from and --evictable are options of load"
    return ""


class _Command:
    """One run of the command."""

    def __init__(self, bus: Bus, settings: Settings, arguments: argparse.Namespace) -> None:
        self._bus = bus
        self._settings = settings
        self._arguments = arguments
        self._operands: list[str] = arguments.operands
        self._folder = os.path.abspath(self._operands[1]) if len(self._operands) > 1 else ""

    async def execute(self) -> int:
        """The exit status; raises WorkerChoiceError."""
        workers = await self._cards(self._arguments.worker)
        match self._arguments.action:
            case "list":
                print("\n".join(adapter_lines(workers)) or "no adapters")
                return 0
            case "unload":
                command = UnloadAdapter(name=self._operands[0], timeout_s=self._arguments.timeout_s)
                _require_one_model(workers)
                replies = await self._send_all(workers, command)
            case _:
                _require_one_model(workers)
                replies = await self._load(workers)
        for card in workers:
            _print(card, replies[card.instance], self._arguments.action)
        return 0 if all(reply.ok for reply in replies.values()) else 1

    async def _cards(self, worker: str | None, model: str = "") -> list[Instance]:
        wanted = model or self._arguments.model
        return await chosen_workers(self._bus, self._settings, wanted, worker)

    async def _load(self, workers: list[Instance]) -> dict[str, ControlReply]:
        """Have workers read the folder, and those that cannot take the files from the others."""
        name, source = self._operands[0], self._arguments.source
        model = model_of(workers[0])
        if not self._folder:
            files = offered_files(await self._cards(source, model), name)
            if files is None:
                raise WorkerChoiceError(f"no worker offers the files of {name}: name a FOLDER")
            return await self._send_all(workers, self._take(files))
        command = self._read(self._folder)
        readers = workers if source is None else await self._cards(source, model)
        replies = await self._send_all(readers, command)
        wanted = {card.instance for card in workers}
        left = [c for c in workers if c.instance not in replies or not replies[c.instance].ok]
        loaded = next((reply.adapter for reply in replies.values() if reply.ok), "")
        able = [c for c in left if c.adapters is not None and c.adapters.limit]
        if loaded and able and (found := await self._offered(loaded, model)) is not None:
            replies |= await self._send_all(able, self._take(found))
        elif source is not None and not loaded:
            return dict.fromkeys(wanted, next(iter(replies.values())))
        missing = "no worker offers the files" if able else "weights.share or max_adapters is off"
        cannot = ControlReply(False, f"it cannot take the files: {missing}")
        return {instance: replies.get(instance, cannot) for instance in wanted}

    async def _offered(self, identity: str, model: str) -> AdapterFiles | None:
        """The files of an adapter that a worker has just loaded; None if it offers none."""
        deadline = time.monotonic() + OFFER_S
        while time.monotonic() < deadline:
            for card in await self._cards(None, model):
                for files in card.adapters.files if card.adapters is not None else ():
                    if files.adapter == identity:
                        return files
            await asyncio.sleep(POLL_S)
        return None

    def _read(self, folder: str) -> LoadAdapter:
        return LoadAdapter(
            name=self._operands[0],
            folder=folder,
            timeout_s=self._arguments.timeout_s,
            pinned=not self._arguments.evictable,
        )

    def _take(self, files: AdapterFiles) -> LoadAdapter:
        return replace(self._read(""), adapter=files.adapter, files=files.digest)

    async def _send_all(
        self, workers: list[Instance], command: AdapterCommand
    ) -> dict[str, ControlReply]:
        """The reply of each worker, by instance."""
        timeout_s = command.timeout_s + SPARE_S
        sent = (send_command(self._bus, card, command, timeout_s) for card in workers)
        replies = await asyncio.gather(*sent)
        return {card.instance: reply for card, reply in zip(workers, replies, strict=True)}


def _require_one_model(workers: list[Instance]) -> None:
    served = sorted({card.model.name for card in workers if card.model is not None})
    if len(served) > 1:
        raise WorkerChoiceError(f"the mesh serves {', '.join(served)}: name one with --model")


def _print(card: Instance, reply: ControlReply, action: str) -> None:
    if reply.ok:
        print(f"{card.name}: {action}ed {reply.adapter}")
    else:
        print(f"{card.name}: {reply.reason}", file=sys.stderr)
