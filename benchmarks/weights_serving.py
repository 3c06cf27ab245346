"""Times between tokens of a worker's streams while another process takes its weights at full rate.

A mock worker with a folder of weights serves streams through a frontend. The taking process reads
chunks as a starting worker does, without an end. Rounds with and without it alternate. Where the
machine has several CPUs, the taking process and the client use others than the mesh.
"""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys

from chat_load import chat, drive, prompts, user
from common import Report, median, percentile
from local_mesh import Mesh, running_mesh
from weights import CHILD, Bench
from weights_children import DONE

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import Instance, MessageDecoder, WeightOffer
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.demo import model_dir
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.process.manifests import ManifestStore
from kvmesh.weights.process.search import SourceSearch

STREAMS, TOKENS = 8, 400
KNOWN_S = 120.0
_cards = MessageDecoder(Instance)


async def serving(bench: Bench, runs: int) -> None:
    """Measure `runs` pairs of rounds."""
    folder = bench.folder / "kvmesh-demo"
    shutil.copytree(model_dir(), folder, ignore=shutil.ignore_patterns("*.py"))
    for file in bench.files:
        os.link(file, folder / file.name)
    options = {
        "KVMESH_WORKER_MODEL": str(folder),
        "KVMESH_WEIGHTS_SHARE": "true",
        "KVMESH_WEIGHTS_DIRECTORY": str(bench.memory / "serving"),
    }
    ours, others = _cpus()
    os.sched_setaffinity(0, ours)
    with running_mesh(1, 1.0, 1, Mesh, **options) as mesh:
        os.sched_setaffinity(0, others)
        bus = await Bus.connect(BusOptions(url=mesh.nats_url), "benchmark")
        offer, manifest = await asyncio.wait_for(_offer(bus), KNOWN_S)
        bodies = map(_body, prompts(0, 32))
        await _gaps(mesh, bodies)
        for run in range(runs):
            order = (False, True) if run % 2 else (True, False)
            for taking in order:
                await _round(bench, mesh, bodies, offer, manifest, taking)
        await bus.close()


async def _round(
    bench: Bench,
    mesh: Mesh,
    bodies: "map[bytes]",
    offer: WeightOffer,
    manifest: Manifest,
    taking: bool,
) -> None:
    taker = await _start_taker(offer, manifest) if taking else None
    gaps = await _gaps(mesh, bodies)
    if taker is not None:
        out, _ = await taker.communicate(b"")
        rate = json.loads(out.decode().partition(DONE)[2])["rate"]
        bench.numbers["serving/rate"].append(rate)
    what = "with" if taking else "without"
    bench.numbers[f"serving/{what}/gaps"] += gaps
    for share in (50, 99):
        bench.numbers[f"serving/{what}/p{share}"].append(1e3 * percentile(gaps, share / 100))


async def _offer(bus: Bus) -> tuple[WeightOffer, Manifest]:
    """The worker's offer of its weights, once it has one."""
    offers: list[WeightOffer] = []
    while True:
        found = await read_bucket(bus, bus.subjects.instances_bucket, "worker.>")
        for data in found.values():
            model = _cards.decode(data).model
            if model is not None and model.weights:
                manifest = await ManifestStore(bus).get(model.weights)
                search = SourceSearch(bus, manifest, "benchmark", offers.append)
                await search.open()
                await search.ask(lambda: bool(offers))
                await search.close()
                if offers:
                    return offers[0], manifest
        await asyncio.sleep(0.2)


async def _start_taker(offer: WeightOffer, manifest: Manifest) -> asyncio.subprocess.Process:
    options = {
        "files": [file.hex() for file in offer.files],
        "chunks": [list(chunk) for chunk in manifest.chunks],
    }
    taker = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), "take", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert taker.stdin is not None
    taker.stdin.write(json.dumps(options).encode() + b"\n")
    await taker.stdin.drain()
    return taker


async def _gaps(mesh: Mesh, bodies: "map[bytes]") -> list[float]:
    """Seconds between pieces of streams, the first ones left out."""
    timings = await drive(mesh.url, itertools.islice(bodies, 2 * STREAMS), STREAMS)
    return [gap for timing in timings for gap in timing.gaps_s[2:-1]]


def _body(prompt: str) -> bytes:
    return chat(user(prompt), TOKENS, True)


def _cpus() -> tuple[set[int], set[int]]:
    known = sorted(os.sched_getaffinity(0))
    half = len(known) // 2
    return (set(known[:half]), set(known[half:])) if half else (set(known), set(known))


def tell_serving(bench: Bench, report: Report) -> None:
    """Add the figures of serving."""
    numbers = bench.numbers
    if not numbers["serving/with/p99"]:
        return
    for share in (50, 99):
        without, during = (numbers[f"serving/{what}/p{share}"] for what in ("without", "with"))
        base = f"{median(without):.2f} without"
        name = f"time between tokens while weights are taken, p{share}"
        report.add_runs(name, during, "ms", base)
        grown = [100 * (a / b - 1) for a, b in zip(during, without, strict=True)]
        target = "≤ 5 %" if share == 99 else ""
        report.add_runs(f"{name}: growth", grown, "%", "", target)
        whole = [
            percentile(numbers[f"serving/{what}/gaps"], share / 100) for what in ("without", "with")
        ]
        together = 100 * (whole[1] / whole[0] - 1)
        report.add(f"{name}, rounds together: growth", together, "%", "", target)
    report.add_runs("rate at which weights are taken", numbers["serving/rate"], "GiB/s")
