"""`kvmesh plan fit`: a step profile from the load reports of running workers."""

import argparse
import asyncio
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.worker_reports import follow_loads
from kvmesh.bus.messages import Instance, Load, Role
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.cli.arguments import UNITS, failed, result_file
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.planner.capacity.profile_fit import FittedProfile, ProfileFitError, fit_profile
from kvmesh.planner.capacity.step_times import StepTimesFit
from kvmesh.settings import Settings
from kvmesh.step_times.profile import EngineLimits, StepProfile
from kvmesh.terminal.console import print_line, stdout_console

HELP = "make a step profile from the load reports of running workers"
PROGRESS_S = 10.0
CELLS = 32  # along prefill and KV: short runs at one load fill few


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh plan fit FILE.npz [--for 5m] [options]"
    parser.epilog = (
        "Load reports are not stored: workers must serve varied requests meanwhile. Engines that"
        " report no time in steps (openai, sglang, trtllm) cannot be measured."
    )
    parser.add_argument("file", type=_npz, metavar="FILE.npz", help="the profile to write")
    parser.add_argument(
        "--for",
        dest="duration",
        type=_duration,
        default="5m",
        metavar="TIME",
        help="time to follow the reports: 90s, 5m, 1h (%(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="only workers of this model")
    parser.add_argument(
        "--worker", action="append", default=[], metavar="NAME", help="only this one; repeatable"
    )


def _npz(text: str) -> Path:
    if not text.endswith(".npz"):
        raise argparse.ArgumentTypeError(f"the name of a profile ends in .npz: {text}")
    return result_file(text)


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or not 0 < float(match[1]) * UNITS[match[2]] <= 86400:
        raise argparse.ArgumentTypeError(f"not a time of at most a day, such as 90s or 5m: {text}")
    return float(match[1]) * UNITS[match[2]]


class MeasuredKind(NamedTuple):
    """The properties that workers must share to be measured together."""

    model: str
    engine: str
    block_size: int
    limits: EngineLimits


class MeasuredWorkers:
    """Samples of the workers of one kind; those of a second kind make it ambiguous."""

    def __init__(self, model: str | None, names: list[str]) -> None:
        self._model = model
        self._names = names
        self._kinds: dict[MeasuredKind, set[str]] = {}
        self._fits: dict[MeasuredKind, StepTimesFit] = {}
        self._of: dict[str, MeasuredKind] = {}
        self._silent: set[str] = set()

    def joined(self, card: Instance) -> None:
        if card.role is not Role.WORKER or card.model is None or card.capacity is None:
            return
        if self._model not in (None, card.model.name) or (
            self._names and card.name not in self._names
        ):
            return
        size, capacity = card.model.block_size, card.capacity
        limits = EngineLimits(
            max(capacity.max_batched_tokens, 1),
            max(capacity.max_sequences, 1),
            max(capacity.blocks * size, 1),
        )
        kind = MeasuredKind(card.model.name, card.engine or "unknown", size, limits)
        if kind not in self._kinds:
            self._kinds[kind] = set()
            self._fits[kind] = StepTimesFit(
                size, limits.max_batched_tokens, limits.kv_tokens, CELLS
            )
        self._kinds[kind].add(card.name)
        self._of[card.instance] = kind

    def left(self, card: Instance) -> None:
        kind = self._of.pop(card.instance, None)
        if kind is not None:
            self._fits[kind].left(card.instance)

    def on_load(self, load: Load) -> None:
        kind = self._of.get(load.instance)
        if kind is not None:
            self._fits[kind].add(load)
            if load.steps and not load.busy_s:
                self._silent.add(kind.engine)

    @property
    def samples(self) -> int:
        return max((fit.added for fit in self._fits.values()), default=0)

    def fit(self) -> tuple[str, FittedProfile]:
        """The workers in words, and their profile; raises ProfileFitError."""
        if not self._kinds:
            raise ProfileFitError("no worker with a known capacity is there")
        if len(self._kinds) > 1:
            groups = "; ".join(", ".join(sorted(names)) for names in self._kinds.values())
            raise ProfileFitError(
                f"the workers differ in model, engine or capacity ({groups}): name those of one"
                " kind with --worker or --model"
            )
        ((kind, names),) = self._kinds.items()
        if self._silent and not self.samples:
            raise ProfileFitError(f"the engine {kind.engine} does not report the time of its steps")
        found = fit_profile(self._fits[kind].cells, kind.limits)
        count = f"{len(names)} worker{'' if len(names) == 1 else 's'}"
        return f"{count} of {kind.model} ({kind.engine})", found


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    measured = MeasuredWorkers(arguments.model, arguments.worker)

    async def follow(bus: Bus) -> int:
        directory = Directory(bus, StreamLimits(), measured.joined, measured.left)
        await directory.open()
        await follow_loads(bus, measured.on_load)
        loop = asyncio.get_running_loop()
        end = loop.time() + arguments.duration
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(left, PROGRESS_S))
            if left > PROGRESS_S and sys.stderr.isatty():
                print(
                    f"{left - PROGRESS_S:.0f} s left, {measured.samples} samples", file=sys.stderr
                )
        await directory.close()
        return 0

    status = run_on_bus("plan fit", settings, follow)
    if status:
        return status
    try:
        workers, found = measured.fit()
        with arguments.file.open("wb") as file:
            np.savez(file, **found.arrays)  # type: ignore[arg-type]
    except ProfileFitError as error:
        return failed("plan fit", error)
    except OSError as error:
        return failed("plan fit", f"cannot write {arguments.file}: {error.strerror}", 2)
    _show(arguments.file, workers, found)
    return 0


def _show(file: Path, workers: str, found: FittedProfile) -> None:
    profile = StepProfile(found.arrays)
    low, high = found.prefill
    few, many = found.decode
    lines = [
        f"{file}: {found.samples:,} samples of {workers}; relative error on held-out samples"
        f" {found.median_error:.1%} (median), {found.p90_error:.1%} (p90)",
        f"prefill: {_ms(profile.prefill(int(low)))} for {low:,.0f} tokens,"
        f" {_ms(profile.prefill(int(high)))} for {high:,.0f}",
        f"decode: {_ms(profile.decode_seconds(1, few))} with {few:,.0f} KV tokens,"
        f" {_ms(profile.decode_seconds(1, many))} with {many:,.0f}",
    ]
    for line in lines:
        print_line(stdout_console(), line)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
