"""Folders of random weights as safetensors files, and weights processes."""

import asyncio
import json
import os
import random
import secrets
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import Instance, ModelCard, Role
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.weights.answer import WeightsAnswer, read_answer
from kvmesh.weights.client import WorkersProcess
from kvmesh.weights.frames import (
    WeightsCounts,
    WeightsEvent,
    WeightsJob,
    WeightsKnown,
    WeightsTaken,
)
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.store import WeightStore

CHUNK = 64 << 10
MAX_BYTES = 1 << 30
LOOK_S = 0.1
E = TypeVar("E")


def make_weights(folder: Path, files: int = 2, tensors: int = 4, size: int = 200_000) -> Path:
    """Write `files` safetensors files of `tensors` random BF16 tensors with `size` bytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        names = [f"layer.{number}.{tensor}" for tensor in range(tensors)]
        write_safetensors(folder / name, dict.fromkeys(names, size), seed=number)
        places |= dict.fromkeys(names, name)
    if files > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_safetensors(path: Path, sizes: dict[str, int], seed: int = 0) -> None:
    """Write one file of random BF16 tensors, given by name and size in bytes."""
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(at)
    path.write_bytes(content)


def stored_copy(directory: Path, folder: Path, manifest: Manifest, flip: bool = False) -> None:
    """Put a complete copy of a folder into a store, to be kept; `flip` damages every chunk."""
    copy = WeightStore(directory, MAX_BYTES).create(manifest)
    copy.set_keep()
    for index, file in enumerate(manifest.files):
        copy.file(index, writable=True)[:] = (folder / file.name).read_bytes()
    for number, (file_index, offset, _) in enumerate(manifest.chunks):
        if flip:
            copy.file(file_index, writable=True)[offset] ^= 1
        copy.mark(number)
    copy.close()


def hurry(pid: int) -> None:
    """Run all threads of a process as ordinary ones, as far as this user may."""
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        number = int(thread.name)
        with suppress(OSError):  # or it has ended
            if os.sched_getscheduler(number) != os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, number, 0)


def weights_process(worker: int) -> int:
    """The id of a worker's weights process; 0 if there is none."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = status.with_name("cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if parent == worker and b"kvmesh.weights.process.main" in command:
            return int(status.parent.name)
    return 0


class Agent:
    """A weights process in a test: a worker's, without the worker."""

    def __init__(self, bus: Bus, limits: StreamLimits, folder: Path, job: WeightsJob) -> None:
        self._bus = bus
        self._limits = limits
        self._lease: Lease | None = None
        self._hurrying: asyncio.Task[None] | None = None
        self.folder = folder
        self.job = job
        self.events: list[WeightsEvent] = []
        self.deaths: list[str] = []
        self.process = WorkersProcess(job, self.events.append, self.deaths.append)

    @property
    def answer(self) -> WeightsAnswer | None:
        return read_answer(Path(self.job.answer_file))

    def event(self, kind: type[E]) -> E | None:
        """The latest event of a kind."""
        return next((e for e in reversed(self.events) if isinstance(e, kind)), None)

    @property
    def digest(self) -> str:
        """The digest for the card of the worker."""
        known = self.event(WeightsKnown)
        return known.digest if known is not None else ""

    @property
    def taken(self) -> list[WeightsTaken]:
        """Each copy that was complete, in order."""
        return [event for event in self.events if isinstance(event, WeightsTaken)]

    @property
    def counts(self) -> WeightsCounts:
        return self.event(WeightsCounts) or WeightsCounts()

    def store(self) -> WeightStore:
        return WeightStore(Path(self.job.env["KVMESH_WEIGHTS_DIRECTORY"]), MAX_BYTES)

    async def start(self) -> None:
        await self.process.start()
        self._hurrying = asyncio.create_task(self._hurry())

    async def _hurry(self) -> None:
        """Give the process its share of a busy machine, which else runs it only when at rest."""
        while True:
            hurry(self.process.pid)
            await asyncio.sleep(LOOK_S)

    async def join(self, digest: str = "", started: float = 0.0, asleep: bool = False) -> None:
        """Publish a card that states the digest of the worker's weights."""
        model = ModelCard(
            name=self.job.model,
            context=9,
            block_size=9,
            files="",
            revision=self.job.revision,
            weights=digest or self.digest,
        )
        card = Instance(
            instance=self.job.instance,
            role=Role.PARKED if asleep else Role.WORKER,
            name=self.job.name,
            version="",
            started=started,
            model=None if asleep else model,
            served=model if asleep else None,
            asleep=asleep,
        )
        self._lease = Lease(self._bus, card, self._limits)
        await self._lease.open()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def close(self) -> None:
        if self._hurrying is not None:
            self._hurrying.cancel()
        if self._lease is not None:
            await self._lease.close()
        await self.process.close()


class Agents:
    """Starts weights processes, each with a store of its own unless they share a node."""

    def __init__(self, bus: Bus, limits: StreamLimits, folder: Path) -> None:
        self._bus = bus
        self._limits = limits
        self._folder = folder
        self._started: list[Agent] = []

    async def start(
        self,
        name: str,
        model_folder: Path | None = None,
        digest: str = "",
        pinned: str = "",
        revision: str = "",
        node: str = "",
        env: Mapping[str, str] | None = None,
        bus: Bus | None = None,
        **settings: object,
    ) -> Agent:
        """Start a process. Without `model_folder` its worker has an empty one.

        `env` are the settings of another connection to NATS, and `bus` that of the worker.
        """
        own = self._folder / name
        own.mkdir(exist_ok=True)
        if model_folder is None:
            model_folder = own / "empty"
            model_folder.mkdir(exist_ok=True)
        weights = {"share": True, "directory": self.directory(node or name), **settings}
        nats = {"url": self._bus.options.url, "namespace": self._bus.options.namespace}
        env = {f"KVMESH_NATS_{key}".upper(): value for key, value in nats.items()} | dict(env or {})
        env |= {f"KVMESH_WEIGHTS_{key}".upper(): str(value) for key, value in weights.items()}
        job = WeightsJob(
            env=env,
            name=name,
            instance=f"{name}-{secrets.token_hex(4)}",
            model="m",
            folder=str(model_folder),
            node=node or name,
            answer_file=str(own / "answer"),
            digest=digest,
            pinned=pinned,
            revision=revision,
        )
        agent = Agent(bus or self._bus, self._limits, own, job)
        self._started.append(agent)
        await agent.start()
        return agent

    def directory(self, node: str) -> Path:
        """The store of a node."""
        return self._folder / f"store-{node}"

    async def close(self) -> None:
        for agent in self._started:
            with suppress(ProcessLookupError):
                agent.signal(signal.SIGCONT)
            await agent.close()
