"""Weights between workers: copies, serving meanwhile, and starts by the place of the weights.

Copies from another worker are measured beside plain ones (weights_copy.py), streams of a worker
while others take its weights (weights_serving.py), and whole starts of torch and vLLM workers from
the disk, the page cache, the node's memory and another worker (weights_starts.py). `--device cuda`
is for the torch engine.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from common import Report, parser
from gpu_model import make_random_model
from local_mesh import free_port, nats_command, wait_for_port
from weights_children import DONE

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import Instance, ModelCard, Role
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.weights.answer import read_answer
from kvmesh.weights.checkpoint import checkpoint_manifest, weight_files
from kvmesh.weights.client import WorkersProcess
from kvmesh.weights.frames import (
    WeightsEvent,
    WeightsFromDisk,
    WeightsJob,
    WeightsKnown,
    WeightsTaken,
)
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.store import WeightStore

CHILD = Path(__file__).with_name("weights_children.py")
PARTS = ("copy", "serving", "torch", "vllm")
ENGINES = PARTS[2:]
START_S = 900.0
T = TypeVar("T")
GIB = 1 << 30
PLAIN_BYTES = 1 << 30


class Bench:
    """The model, its stores in shared memory, and the processes of one measurement."""

    def __init__(
        self,
        folder: Path,
        memory: Path,
        device: str,
        quick: bool,
        engines: bool = True,
        size: int = PLAIN_BYTES,
    ) -> None:
        self.folder = folder
        self.memory = memory
        self.device = device
        self.model = folder / "model"
        self.bare = folder / "bare" / "model"
        if not engines:
            write_plain_weights(self.model, size)
        elif quick:
            from kvmesh.worker.models.tiny_model import make_tiny_model

            make_tiny_model(self.model)
        else:
            make_random_model(self.model, "700m", device)
        ignored = shutil.ignore_patterns("*.safetensors*")
        shutil.copytree(self.model, self.bare, ignore=ignored)
        self.files = weight_files(self.model)
        self.size = sum(file.stat().st_size for file in self.files)
        self.numbers = defaultdict[str, list[float]](list)

    def evict(self) -> None:
        """Drop the files from the page cache."""
        for path in self.files:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self) -> None:
        """Put the files into the page cache."""
        for path in self.files:
            with path.open("rb") as file:
                while file.read(8 << 20):
                    pass

    @contextmanager
    def without_files(self) -> Iterator[None]:
        """The model has no weight files in the block; who has opened them keeps them."""
        moved = {path: self.folder / f"away-{path.name}" for path in self.files}
        for path, hidden in moved.items():
            path.rename(hidden)
        try:
            yield
        finally:
            for path, hidden in moved.items():
                hidden.rename(path)

    def remember(self, directory: Path, manifest: Manifest | None = None) -> None:
        """Put a complete copy into a store, to be kept."""
        manifest = manifest or checkpoint_manifest(self.model)
        copy = WeightStore(directory, self.size * 8).create(manifest)
        copy.set_keep()
        for index, path in enumerate(self.files):
            copy.file(index, writable=True)[:] = path.read_bytes()
        for chunk in range(len(manifest.chunks)):
            copy.mark(chunk)
        copy.close()


def write_plain_weights(folder: Path, size: int, tensors: int = 16) -> None:
    """Write a folder with one file of random weights, for what needs no engine."""
    folder.mkdir(parents=True)
    each = size // tensors
    header = {
        f"tensor-{n}": {"dtype": "U8", "shape": [each], "data_offsets": [n * each, (n + 1) * each]}
        for n in range(tensors)
    }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(tensors):
            file.write(os.urandom(each))


async def run_child(what: str, options: Any, log: Path) -> dict[str, float]:
    """The results of a process; raises RuntimeError."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(CHILD),
            what,
            json.dumps(options),
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            limit=1 << 20,
        )
    found: dict[str, float] = {}
    lines = []
    try:
        async with asyncio.timeout(START_S):
            assert process.stdout is not None
            async for line in process.stdout:
                text = line.decode(errors="replace")
                lines.append(text)
                if DONE in text:
                    found = {**json.loads(text.partition(DONE)[2]), **found}
            await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = "".join(lines) + await asyncio.to_thread(log.read_text, errors="replace")
    if "seconds" not in found:
        raise RuntimeError(f"{what} failed; the end of its log:\n{said[-3000:]}")
    return found


@asynccontextmanager
async def mesh(folder: Path) -> AsyncIterator[Bus]:
    """A NATS server, and a connection to it."""
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        *nats_command(folder, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        await asyncio.to_thread(wait_for_port, port)
        bus = await Bus.connect(BusOptions(url=f"nats://127.0.0.1:{port}"), "benchmark")
        await ensure_streams(bus, StreamLimits())
        try:
            yield bus
        finally:
            await bus.close()
    finally:
        server.kill()
        await server.wait()


class WeightsProcess:
    """A weights process of a worker that exists only as a card."""

    def __init__(self, bench: Bench, bus: Bus, name: str, folder: Path) -> None:
        self._bus = bus
        self._lease: Lease | None = None
        self.events: list[WeightsEvent] = []
        self.directory = bench.memory / f"{name}-{secrets.token_hex(4)}"
        self.answer_file = bench.folder / f"answer-{self.directory.name}"
        self.job = WeightsJob(
            env={
                "KVMESH_NATS_URL": bus.options.url,
                "KVMESH_WEIGHTS_SHARE": "true",
                "KVMESH_WEIGHTS_DIRECTORY": str(self.directory),
                "KVMESH_WEIGHTS_MAX_BYTES": str(bench.size * 8),
            },
            name=name,
            instance=self.directory.name,
            model="model",
            folder=str(folder),
            node=name,
            answer_file=str(self.answer_file),
        )
        self.process = WorkersProcess(self.job, self.events.append, self._died)
        self._death = ""

    def _died(self, reason: str) -> None:
        self._death = reason
        self.process.read_folder(reason)  # an engine that starts must not wait either

    async def until(self, found: Callable[[], T | None], what: str) -> T:
        """The first result of `found`; raises RuntimeError if the process dies or is too slow."""
        deadline = time.monotonic() + START_S
        while (result := found()) is None:
            if self._death or time.monotonic() > deadline:
                reason = self._death or f"not within {START_S:g} s"
                raise RuntimeError(f"{self.job.name}: no {what}: {reason}")
            await asyncio.sleep(0.01)
        return result

    async def event(self, kind: type[T]) -> T:
        """The first event of a kind; raises RuntimeError, also if the engine reads its folder."""

        def find() -> T | None:
            for event in self.events:
                if isinstance(event, kind):
                    return event
                if isinstance(event, WeightsFromDisk) and kind is WeightsTaken:
                    self._death = event.reason
            return None

        return await self.until(find, kind.__name__)

    async def offer(self) -> None:
        """Offer the files of the folder to others."""
        await self.process.start()
        await self.until(lambda: read_answer(self.answer_file), "answer")
        self.process.engine_runs()
        known = await self.event(WeightsKnown)
        await self.join(known.digest)

    async def join(self, digest: str) -> None:
        """Show a card with the digest of the weights."""
        model = ModelCard(name="model", context=9, block_size=9, files="", weights=digest)
        card = Instance(
            instance=self.job.instance,
            role=Role.WORKER,
            name=self.job.name,
            version="",
            started=time.time(),
            model=model,
        )
        self._lease = Lease(self._bus, card, StreamLimits())
        await self._lease.open()

    async def close(self) -> None:
        if self._lease is not None:
            await self._lease.close()
        await self.process.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def tell(bench: Bench, report: Report) -> None:
    """Add the figures that were measured to the report."""
    from weights_copy import tell_copies
    from weights_serving import tell_serving
    from weights_starts import tell_starts

    tell_copies(bench, report)
    tell_serving(bench, report)
    for engine in ENGINES:
        tell_starts(bench, report, engine)


async def measure(bench: Bench, parts: list[str], runs: int) -> None:
    from weights_copy import copies
    from weights_serving import serving
    from weights_starts import starts

    if "serving" in parts:
        await serving(bench, runs)
    if "copy" in parts:
        await copies(bench, runs)
    for engine in ENGINES:
        if engine in parts:
            await starts(bench, engine, runs)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="a model of 3 MB, one run")
    arguments.add_argument("--runs", type=int, default=0, metavar="N", help="default: 3")
    arguments.add_argument(
        "--size", type=int, default=0, metavar="BYTES", help="of weights without an engine"
    )
    arguments.add_argument(
        "--memory", default="/dev/shm", metavar="FOLDER", help="in a file system in memory"
    )
    arguments.add_argument("--only", default=",".join(PARTS), metavar="PART,…", help="of these")
    arguments.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    chosen = arguments.parse_args()
    parts = [part for part in chosen.only.split(",") if part]
    if unknown := set(parts) - set(PARTS):
        arguments.error(f"there is no part {', '.join(sorted(unknown))}")
    runs = chosen.runs or (1 if chosen.quick else 3)
    report = Report("Weights", "baseline")
    with (
        tempfile.TemporaryDirectory(prefix="kvmesh-weights-") as folder,
        tempfile.TemporaryDirectory(prefix="kvmesh-weights-", dir=chosen.memory) as memory,
    ):
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        engines = bool(set(parts) & set(ENGINES))
        size = chosen.size or (PLAIN_BYTES // 64 if chosen.quick else PLAIN_BYTES)
        bench = Bench(Path(folder), Path(memory), chosen.device, chosen.quick, engines, size)
        print(f"a model of {bench.size / GIB:.2f} GiB", file=sys.stderr, flush=True)
        try:
            asyncio.run(measure(bench, parts, runs))
        finally:
            tell(bench, report)
            report.finish("starts by the place of the weights", chosen.json)


if __name__ == "__main__":
    main()
