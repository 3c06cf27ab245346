"""Workers that take weights from each other, started and harmed one after the other."""

import asyncio
import multiprocessing
import os
import secrets
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from operator import ne
from pathlib import Path
from typing import TypeVar

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import Instance, ModelCard, Role
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.weights.frames import WeightsCounts
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.stored_copy import HELD
from support.nats import free_port
from support.proxy import Proxy
from support.wait import PATIENCE_S
from support.weights import weights_process
from support.weights_worker import MODULES, Loaded, StartOrder, run_worker

T = TypeVar("T")
OWN, PUBLIC = "127.0.0.1", "127.0.0.2"  # a worker's address, and that of the proxy before it
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["__main__", *MODULES])


def call_in_child(function: Callable[..., T], *arguments: object) -> T:
    """The result of a function, called in a process that has imported torch."""
    pipe, theirs = _context.Pipe()
    process = _context.Process(target=_call, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not pipe.poll(PATIENCE_S):
            raise AssertionError("the child has not finished")
        found: T = pipe.recv()
        return found
    finally:
        process.kill()
        process.join()


def _call(pipe: Connection, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    pipe.send(function(*arguments))


class FleetWorker:
    """One worker. Others reach its weights through `proxy`."""

    def __init__(self, order: StartOrder, directory: Path, proxy: Proxy) -> None:
        self.order = order
        self.directory = directory
        self.proxy = proxy
        self.loaded: Loaded | None = None
        self.digest = ""
        self.altered = False
        self._counts = WeightsCounts()
        self.failed: Counter[str] = Counter()
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=run_worker, args=(order, theirs))
        self._process.start()
        theirs.close()
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._receive)

    @property
    def weights_pid(self) -> int:
        """The id of its weights process; 0 if there is none now."""
        return weights_process(self._process.pid or 0)

    def signal(self, number: int) -> None:
        """Send a signal to the weights process, if there is one."""
        if pid := self.weights_pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def chunks(self, digest: str) -> bytes:
        """The state of each chunk of a copy in its store; empty if there is no such copy."""
        with suppress(OSError):
            return (self.directory / digest / "have").read_bytes()
        return b""

    def wrong_bytes(self, manifest: Manifest, model: Path) -> int:
        """Bytes that its store declares present and that differ from the model's."""
        have, wrong = self.chunks(manifest.digest), 0
        for number, (file, offset, size) in enumerate(manifest.chunks if have else []):
            if have[number] == HELD:
                name = manifest.files[file].name
                stored = self.directory / manifest.digest / "files" / name
                parts = []
                for path in (stored, model / name):
                    with path.open("rb") as content:
                        content.seek(offset)
                        parts.append(content.read(size))
                wrong += sum(map(ne, *parts))
        return wrong

    def log(self) -> str:
        """The end of its log."""
        return self.order.output.read_text()[-4000:]

    async def close(self) -> None:
        """End the worker as a whole; the copy goes with it."""
        asyncio.get_running_loop().remove_reader(self.pipe.fileno())
        self.signal(signal.SIGCONT)
        self.proxy.release()
        with suppress(OSError):
            self.pipe.send(None)
        await asyncio.to_thread(self._process.join, PATIENCE_S)
        assert self._process.exitcode == 0, self.log()
        self.proxy.stop()
        self.pipe.close()

    def _receive(self) -> None:
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self.loaded = self.loaded or Loaded(error="the process has ended")
            return
        if isinstance(message, Loaded):
            self.loaded = message
        elif isinstance(message, str):
            self.digest = message
        elif isinstance(message, WeightsCounts):
            before = self._counts.failed if message.sent >= self._counts.sent else {}
            for reason, count in message.failed.items():
                self.failed[reason] += max(count - before.get(reason, 0), 0)
            self._counts = message


class Fleet:
    """Starts workers of one model on the mesh of `bus`, each with a store below `folder`."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self._bus = bus
        self._folder = folder
        self._started = 0
        self.workers: list[FleetWorker] = []

    def directory(self, name: str) -> Path:
        """The store of a node."""
        return self._folder / f"store-{name}"

    def start(
        self, model: Path, env: Mapping[str, str], directory: Path | None = None
    ) -> FleetWorker:
        """Start a worker of the model folder; `env` are further settings."""
        name = f"w{self._started}"
        self._started += 1
        directory = directory or self.directory(name)
        port = free_port()
        proxy = Proxy(port, OWN, listen=port, address=PUBLIC)
        proxy.start()
        nats = self._bus.options
        settings = {
            "KVMESH_NATS_URL": nats.url,
            "KVMESH_NATS_NAMESPACE": nats.namespace,
            "KVMESH_WEIGHTS_SHARE": "true",
            "KVMESH_WEIGHTS_DIRECTORY": str(directory),
            "KVMESH_WEIGHTS_PORT": str(port),
            "KVMESH_TRANSFER_ADVERTISE": PUBLIC,
            "KVMESH_WORKER_ENGINE": "torch",
            "KVMESH_WORKER_SERVED_NAME": "m",
            "KVMESH_TORCH_DEVICE": "cpu",
            "KVMESH_TORCH_THREADS": "1",
            "KVMESH_TORCH_BLOCKS": "4",
        }
        order = StartOrder(
            name=name,
            instance=f"{name}-{secrets.token_hex(4)}",
            folder=model,
            env={**settings, **env},
            output=self._folder / f"{name}.log",
        )
        worker = FleetWorker(order, directory, proxy)
        self.workers.append(worker)
        return worker

    async def publish(self, limits: StreamLimits, digest: str) -> Lease:
        """Let the model's oldest worker state the digest of its weights; it serves none."""
        model = ModelCard(name="m", context=9, block_size=9, files="", weights=digest)
        card = Instance(
            instance="oldest", role=Role.WORKER, name="oldest", version="", started=0.0, model=model
        )
        lease = Lease(self._bus, card, limits)
        await lease.open()
        return lease

    async def remove(self, worker: FleetWorker) -> None:
        """End a worker, and remove its node's store if it was the last one there."""
        self.workers.remove(worker)
        await worker.close()
        if all(other.directory != worker.directory for other in self.workers):
            shutil.rmtree(worker.directory, ignore_errors=True)
