"""Time until a worker is routable, by the places of its weights and of its compiled code.

Each start is a process of its own, alone on the machine but for an idle worker where one is its
source. Its times are those on its card, from the creation of the process until routers see it.
Between starts the model's files are dropped from the page cache, read into it, or moved away, so
that a worker has only what its place names.
"""

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from common import Report, median
from rich.console import Console
from rich.table import Table
from weights import START_S, Bench, mesh

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    ControlReply,
    Instance,
    MessageDecoder,
    Promote,
    Role,
    StartPhase,
)
from kvmesh.bus.storage.buckets import read_bucket

STOP_S = 60.0
OFFERED_S = 120.0
COLD, PAGES, NODE, PEER = "disk", "page cache", "node memory", "another worker"
PROMOTED = "promoted"
WHOLE = "until routable"
CACHES = {"torch": ("",), "vllm": ("empty cache", "filled cache")}  # torch compiles nothing
ENGINE_ENV = {
    "torch": {"KVMESH_WORKER_ENGINE": "torch"},
    "vllm": {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_BLOCK_SIZE": "32",
        "KVMESH_VLLM_ARGS": "num_gpu_blocks_override=64,max_model_len=512,max_num_seqs=4,"
        "max_num_batched_tokens=64,gpu_memory_utilization=0.3,enforce_eager=false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    },
}
_cards = MessageDecoder(Instance)
_replies = MessageDecoder(ControlReply)


async def starts(bench: Bench, engine: str, runs: int) -> None:
    """Measure `runs` rounds of an engine's starts."""
    for run in range(runs):
        folder = bench.folder / f"{engine}-{run}"
        folder.mkdir()
        async with mesh(folder) as bus:
            await _round(_Workers(bench, bus, folder, engine), run)


async def _round(workers: "_Workers", run: int) -> None:
    bench = workers.bench
    for place, prepare in ((COLD, bench.evict), (PAGES, bench.read)):
        for cache in workers.caches:
            prepare()
            code = "compiled" if cache == "filled cache" or place == COLD else place
            await workers.measure(run, place, cache, code=code)
    keep = {"KVMESH_WEIGHTS_KEEP": "true"}
    async with workers.started("first", memory="kept", code="compiled", **keep):
        await workers.card("first", Role.WORKER)
    for cache in workers.caches:
        code = "compiled" if cache == "filled cache" else NODE
        await workers.measure(run, NODE, cache, memory="kept", code=code, **keep)
    workers.forget("kept")
    async with workers.started("source", **workers.shared(domain=True)):
        await workers.offering()
        with bench.without_files():
            for cache in workers.caches:
                await workers.measure(
                    run, PEER, cache, **workers.shared(domain=cache == "filled cache")
                )
            waits = workers.shared(domain=True) | {"KVMESH_WORKER_PARKED": "true"}
            async with workers.started(PROMOTED, **waits):
                parked = await workers.card(PROMOTED, Role.PARKED)
                await workers.promote(parked)
                workers.note(run, PROMOTED, await workers.card(PROMOTED, Role.WORKER))


def tell_starts(bench: Bench, report: Report, engine: str) -> None:
    """Add the times to the report, and print those of all phases."""
    found = {
        name.removeprefix(f"{engine}/"): runs
        for name, runs in bench.numbers.items()
        if name.startswith(f"{engine}/")
    }
    medians = {name: median(runs) for name, runs in found.items()}
    names = list(dict.fromkeys(name.rpartition("/")[0] for name in found))
    if not names:
        return
    cold = names[0]
    for phase in (WHOLE, StartPhase.WEIGHTS):
        whole = medians[f"{cold}/{phase}"]
        for name in names:
            if runs := found.get(f"{name}/{phase}"):
                share = f"{100 * median(runs) / whole:.0f} % of {whole:.2f}"
                target = _target(engine, name, phase)
                report.add_runs(f"{engine}, {name}: {phase}", runs, "s", share, target)
    table = Table(title=f"{engine}: seconds of each phase", title_justify="left")
    table.add_column("phase")
    for name in names:
        table.add_column(name, justify="right")
    for phase in (*StartPhase, WHOLE):
        row = [medians.get(f"{name}/{phase}") for name in names]
        if phase != StartPhase.PARKED and any(row):
            table.add_row(phase, *("" if value is None else f"{value:.2f}" for value in row))
    Console(width=None if os.isatty(1) else 150).print(table)


def _target(engine: str, name: str, phase: str) -> str:
    if phase == StartPhase.WEIGHTS:
        return "≤ 10 %" if name.startswith(NODE) else ""
    targets = {f"{PEER}, filled cache": "≤ 60 %", PROMOTED: "≤ 25 %"}
    return targets.get(name, "") if engine == "vllm" else ""


class _Workers:
    """Workers of one engine and mesh, each with directories of its own unless they are named."""

    def __init__(self, bench: Bench, bus: Bus, folder: Path, engine: str) -> None:
        self.bench = bench
        self.caches = CACHES[engine]
        self._bus = bus
        self._folder = folder
        self._engine = engine
        self._key = secrets.token_hex(32)
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def measure(self, run: int, place: str, cache: str, **given: str) -> None:
        """Start a worker, and note its times under its place."""
        name = f"{place}, {cache}" if cache else place
        async with self.started(name, **given):
            self.note(run, name, await self.card(name, Role.WORKER))

    def note(self, run: int, name: str, card: Instance) -> None:
        """Note the times of a start."""
        whole = card.promoted_s if name == PROMOTED else card.startup_s
        row = {WHOLE: whole} | {phase.name: phase.seconds for phase in card.phases}
        for phase, seconds in row.items():
            self.bench.numbers[f"{self._engine}/{name}/{phase}"].append(seconds)
        shown = {phase: round(seconds, 2) for phase, seconds in row.items()}
        sources = {each.part: each.source for each in card.sources}
        print(run + 1, self._engine, name, shown, sources, file=sys.stderr, flush=True)

    def shared(self, domain: bool) -> dict[str, str]:
        """The settings of a worker that shares weights, with its `domain` compiled code, too."""
        code = {"KVMESH_WEIGHTS_DOMAIN_KEY": self._key, "KVMESH_WEIGHTS_CACHE_WAIT_S": "60"}
        return {"KVMESH_WEIGHTS_SHARE": "true"} | (code if domain else {})

    @asynccontextmanager
    async def started(
        self, name: str, memory: str = "", code: str = "", **env: str
    ) -> AsyncIterator[None]:
        """A worker that ends with the block; `memory` and `code` name its directories."""
        bench, place = self.bench, _file_name(name)
        memories = bench.memory / self._folder.name
        settings = {
            "KVMESH_NATS_URL": self._bus.options.url,
            "KVMESH_WORKER_MODEL": str(bench.model),
            "KVMESH_WORKER_NAME": place,
            "KVMESH_WEIGHTS_COMPILE_CACHE": "true",
            "KVMESH_WEIGHTS_DIRECTORY": str(memories / (_file_name(memory) or place)),
            "KVMESH_WEIGHTS_CACHE_DIRECTORY": str(
                self._folder / f"code-{_file_name(code) or place}"
            ),
            "KVMESH_WEIGHTS_MAX_BYTES": str(bench.size * 8),
            "KVMESH_TORCH_DEVICE": bench.device,
        }
        memories.mkdir(exist_ok=True)
        with self._log(name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvmesh.cli.main", "worker"),
                stdout=log,
                stderr=log,
                env={**os.environ, **ENGINE_ENV[self._engine], **settings, **env},
            )
        self._processes[name] = process
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()

    def forget(self, memory: str) -> None:
        """Free what workers have kept: a machine that has less memory left gives it more slowly."""
        shutil.rmtree(self.bench.memory / self._folder.name / memory)

    async def card(self, name: str, role: Role) -> Instance:
        """The card of a worker once it has the role; raises RuntimeError if it does not come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while self._processes[name].returncode is None:
                    for card in await self._present(role):
                        started = role is Role.PARKED or card.startup_s > 0
                        if card.name == _file_name(name) and started:
                            return card
                    await asyncio.sleep(0.2)
        log = self._log(name).read_text(errors="replace")
        raise RuntimeError(f"{name} did not start:\n{log[-3000:]}")

    async def promote(self, parked: Instance) -> None:
        """Have a parked worker serve."""
        subject = self._bus.subjects.ctl(parked.instance)
        await self._bus.request(subject, Promote(), _replies, STOP_S)

    async def offering(self) -> None:
        """Return once a worker offers its weights, and its code if its engine compiles any."""
        async with asyncio.timeout(START_S + OFFERED_S):
            while not any(
                (card.compiled is not None or self._engine == "torch")
                and card.model is not None
                and card.model.weights
                for card in await self._present(Role.WORKER)
            ):
                await asyncio.sleep(0.2)

    async def _present(self, role: Role) -> list[Instance]:
        found = await read_bucket(self._bus, self._bus.subjects.instances_bucket, f"{role}.>")
        return [_cards.decode(data) for data in found.values()]

    def _log(self, name: str) -> Path:
        return self._folder / f"{_file_name(name)}.log"


def _file_name(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")
