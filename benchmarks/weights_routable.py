"""Time until a vLLM worker is routable, from the creation of its process, by what it finds.

`cold`: files that are not in the page cache, and an empty compile cache. `from a worker`: another
worker offers weights and compiled code. `promoted`: it was parked with these, and is told to serve.
All three start alone on the machine, beside a worker that is idle; the cold one without it.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from common import Report, median
from weights import START_S, Bench, mesh

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import ControlReply, Instance, MessageDecoder, Promote, Role
from kvmesh.bus.storage.buckets import read_bucket

STOP_S = 60.0
OFFERED_S = 120.0
TARGETS = {"from a worker": "≤ 60 %", "promoted": "≤ 25 %"}
_cards = MessageDecoder(Instance)
_replies = MessageDecoder(ControlReply)


async def routable(bench: Bench, runs: int) -> None:
    """Measure `runs` rounds of all."""
    for run in range(runs):
        folder = bench.folder / f"routable-{run}"
        folder.mkdir()
        async with mesh(folder) as bus:
            workers = _Workers(bench, bus, folder)
            bench.evict()
            async with workers.started("cold", share=False):
                cold = await workers.card("cold", Role.WORKER)
            bench.read()
            async with workers.started("source"):
                await workers.offering()
                async with workers.started("taker"):
                    taker = await workers.card("taker", Role.WORKER)
                async with workers.started("parked", KVMESH_WORKER_PARKED="true"):
                    waiting = await workers.card("parked", Role.PARKED)
                    await bus.request(
                        bus.subjects.ctl(waiting.instance), Promote(), _replies, STOP_S
                    )
                    promoted = await workers.card("parked", Role.WORKER)
        found = {
            "cold": cold.startup_s,
            "from a worker": taker.startup_s,
            "promoted": promoted.promoted_s,
        }
        for name, seconds in found.items():
            bench.numbers[f"routable/{name}"].append(seconds)
        rows = {card.name: {p.name: p.seconds for p in card.phases} for card in (cold, taker)}
        print(run + 1, found, rows, file=sys.stderr, flush=True)


def tell_routable(bench: Bench, report: Report) -> None:
    """Add the figures to the report."""
    cold = median(bench.numbers["routable/cold"])
    for name in ("cold", *TARGETS):
        if runs := bench.numbers[f"routable/{name}"]:
            share = f"{100 * median(runs) / cold:.0f} % of {cold:.1f}"
            report.add_runs(
                f"vllm worker, {name}: routable", runs, "s", share, TARGETS.get(name, "")
            )


class _Workers:
    """Workers of one mesh, each with directories of its own, as on a machine of its own."""

    def __init__(self, bench: Bench, bus: Bus, folder: Path) -> None:
        self._bench = bench
        self._bus = bus
        self._folder = folder
        self._key = secrets.token_hex(32)
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    @asynccontextmanager
    async def started(self, name: str, share: bool = True, **env: str) -> AsyncIterator[None]:
        """A worker that ends with the block."""
        bench = self._bench
        arguments = "num_gpu_blocks_override=64,max_model_len=512,max_num_seqs=4"
        settings = {
            "KVMESH_NATS_URL": self._bus.options.url,
            "KVMESH_WORKER_ENGINE": "vllm",
            "KVMESH_WORKER_BLOCK_SIZE": "32",
            "KVMESH_WORKER_MODEL": str(bench.model),
            "KVMESH_WORKER_NAME": name,
            "KVMESH_VLLM_ARGS": f"{arguments},gpu_memory_utilization=0.3,enforce_eager=false",
            "KVMESH_WEIGHTS_SHARE": str(share).lower(),
            "KVMESH_WEIGHTS_COMPILE_CACHE": "true",
            "KVMESH_WEIGHTS_CACHE_WAIT_S": "60",
            "KVMESH_WEIGHTS_DOMAIN_KEY": self._key,
            "KVMESH_WEIGHTS_DIRECTORY": str(bench.memory / f"{name}-{self._folder.name}"),
            "KVMESH_WEIGHTS_CACHE_DIRECTORY": str(self._folder / f"{name}-compiled"),
            "KVMESH_WEIGHTS_MAX_BYTES": str(bench.size * 8),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvmesh.cli.main", "worker"),
                stdout=log,
                stderr=log,
                env={**os.environ, **settings, **env},
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

    async def card(self, name: str, role: Role) -> Instance:
        """The card of a worker once it has the role; raises RuntimeError if it does not come."""
        try:
            async with asyncio.timeout(START_S):
                while self._processes[name].returncode is None:
                    for card in await self._present(role):
                        if card.name == name and (role is Role.PARKED or card.startup_s):
                            return card
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pass
        log = (self._folder / f"{name}.log").read_text(errors="replace")
        raise RuntimeError(f"{name} did not start:\n{log[-3000:]}")

    async def offering(self) -> None:
        """Return once a worker offers its weights and its code."""
        async with asyncio.timeout(START_S + OFFERED_S):
            while not any(
                card.compiled is not None and card.model is not None and card.model.weights
                for card in await self._present(Role.WORKER)
            ):
                await asyncio.sleep(0.2)

    async def _present(self, role: Role) -> list[Instance]:
        found = await read_bucket(self._bus, self._bus.subjects.instances_bucket, f"{role}.>")
        return [_cards.decode(data) for data in found.values()]
