"""Copies between two processes: a weights process's beside plain ones through a socket and NIXL.

The plain copies run at the priorities of the weights processes, so that others who use the machine
slow all of them down alike. Rounds alternate.
"""

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import Report, cpu_seconds, median
from msgspec.structs import replace
from weights import CHILD, GIB, START_S, Bench, WeightsProcess, mesh, run_child
from weights_children import DONE

from kvmesh.bus.client import Bus
from kvmesh.weights.answer import read_answer
from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.client import WorkersProcess
from kvmesh.weights.frames import WeightsKnown, WeightsTaken
from kvmesh.weights.process.manifests import ManifestStore

HAS_NIXL = importlib.util.find_spec("nixl") is not None
NIXL_BYTES = 1 << 28  # of the plain read


class Holder(WeightsProcess):
    """A weights process that may begin with a complete copy, in `directory`."""

    def __init__(
        self,
        bench: Bench,
        bus: Bus,
        name: str,
        folder: Path,
        directory: Path | None = None,
        digest: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(bench, bus, name, folder)
        if directory is not None:
            self.directory = directory
        place = {"KVMESH_WEIGHTS_DIRECTORY": str(self.directory)}
        self.job = replace(self.job, env=self.job.env | place | dict(env or {}), digest=digest)
        self.process = WorkersProcess(self.job, self.events.append, print)


async def copies(bench: Bench, runs: int) -> None:
    """Bytes per second from another worker, and through a plain socket."""
    async with mesh(bench.folder) as bus:
        source = WeightsProcess(bench, bus, "source", bench.model)
        await source.offer()
        try:
            for run in range(runs):
                bench.read()
                for what in ("ready", "fresh"):
                    rate = await _plain(bench, run, fresh=what == "fresh")
                    bench.numbers[f"raw/{what}"].append(rate)
                await _taken(bench, bus, "tcp", [source], "tcp")
        finally:
            await source.close()
    if HAS_NIXL:
        await _through_nixl(bench, runs)


async def _through_nixl(bench: Bench, runs: int) -> None:
    manifest = checkpoint_manifest(bench.model)
    kept = bench.memory / "kept-copy"
    bench.remember(kept)
    place = bench.folder / "nixl"
    place.mkdir()
    nixl = {"KVMESH_TRANSFER_VIA": "nixl"}
    async with mesh(place) as bus:
        await ManifestStore(bus).put(manifest)
        source = Holder(bench, bus, "kept", bench.bare, kept, manifest.digest, nixl)
        await source.process.start()
        await source.event(WeightsKnown)
        await source.join(manifest.digest)
        try:
            for run in range(runs):
                log = bench.folder / f"raw-nixl-{run}.log"
                raw = await run_child("nixl", {"size": NIXL_BYTES}, log)
                bench.numbers["raw/nixl"].append(raw["rate"])
                bench.numbers["raw/memory"].append(await _plain(bench, run, False, kept))
                for via in ("tcp", "nixl"):
                    await _taken(bench, bus, f"memory/{via}", [source], via)
        finally:
            await source.close()
    shutil.rmtree(kept, ignore_errors=True)


async def _taken(
    bench: Bench, bus: Bus, name: str, sources: list[WeightsProcess], via: str
) -> None:
    """Have a new weights process take the copy; its CPU time is that of its whole life."""
    target = Holder(bench, bus, "target", bench.bare, env={"KVMESH_TRANSFER_VIA": via})
    before = sum(cpu_seconds(each.process.pid) for each in sources)
    await target.process.start()
    try:
        async with asyncio.timeout(START_S):
            while read_answer(target.answer_file) is None:  # until it runs and has a source
                await asyncio.sleep(0.005)
        started = cpu_seconds(target.process.pid)
        taken: WeightsTaken = await target.event(WeightsTaken)
        spent = cpu_seconds(target.process.pid) - started
    finally:
        await target.close()
    sent = sum(cpu_seconds(each.process.pid) for each in sources) - before
    rate = bench.size / taken.seconds / GIB
    print(f"{name}: {rate:.2f} GiB/s", file=sys.stderr, flush=True)
    bench.numbers[f"copy/{name}"].append(rate)
    bench.numbers[f"cpu/{name}"].append((spent + sent) / (bench.size / GIB))
    if name.endswith("nixl") and taken.direct < bench.size / 2:
        raise RuntimeError(f"only {taken.direct} bytes came through NIXL")


async def _plain(bench: Bench, run: int, fresh: bool, folder: Path | None = None) -> float:
    """GiB per second through a socket, from the files into shared memory."""
    files = bench.files if folder is None else _files_in(folder)
    sender = await asyncio.create_subprocess_exec(
        sys.executable,
        str(CHILD),
        "send",
        json.dumps([str(file) for file in files]),
        stdout=subprocess.PIPE,
    )
    assert sender.stdout is not None
    async with asyncio.timeout(START_S):
        told = (await sender.stdout.readline()).decode()
        port = json.loads(told.partition(DONE)[2])["port"]
        size = sum(file.stat().st_size for file in files)
        options: dict[str, Any] = {"port": port, "size": size, "directory": str(bench.memory)}
        log = bench.folder / f"raw-{run}.log"
        raw = await run_child("receive", {**options, "fresh": fresh}, log)
        spent = json.loads((await sender.stdout.readline()).decode().partition(DONE)[2])["cpu"]
        await sender.wait()
    bench.numbers["cpu/fresh" if fresh else "cpu/ready"].append((raw["cpu"] + spent) / size * GIB)
    rate = size / raw["seconds"] / GIB
    print(f"plain: {rate:.2f} GiB/s", file=sys.stderr, flush=True)
    return rate


def _files_in(store: Path) -> list[Path]:
    return sorted(store.glob("*/files/*"))


def tell_copies(bench: Bench, report: Report) -> None:
    """Add the figures of the copies."""
    numbers = bench.numbers
    shown = {
        "tcp": ("copy of another worker's files", "raw/ready"),
        "memory/tcp": ("copy of another worker's memory, TCP", "raw/memory"),
        "memory/nixl": ("copy of another worker's memory, NIXL", "raw/nixl"),
    }
    if numbers["raw/fresh"]:
        report.add_runs("plain socket into fresh memory", numbers["raw/fresh"], "GiB/s")
        for what in ("ready", "fresh"):
            name = f"plain socket into {what} memory: CPU of both sides"
            report.add_runs(name, numbers[f"cpu/{what}"], "s/GiB")
    for key, (name, raw) in shown.items():
        if not numbers[f"copy/{key}"]:
            continue
        plain = f"{median(numbers[raw]):.2f} plain"
        report.add_runs(name, numbers[f"copy/{key}"], "GiB/s", plain)
        shares = [
            100 * ours / theirs
            for ours, theirs in zip(numbers[f"copy/{key}"], numbers[raw], strict=True)
        ]
        report.add_runs(f"{name}: share of the round's plain copy", shares, "%", "", "≥ 80 %")
        report.add_runs(f"{name}: CPU of both sides", numbers[f"cpu/{key}"], "s/GiB")
