"""The setup for measurements of an indexer: a NATS server, the service, publishing workers."""

import asyncio
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import cpu_seconds
from local_mesh import free_port, nats_command, wait_for_port

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import (
    Capacity,
    Instance,
    KvBatch,
    KvEvent,
    ModelCard,
    Removed,
    Role,
    Stored,
    encode,
)
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.hashing import salt, sequence_hashes

MODEL = "bench"
SALT = salt(MODEL)
LIMITS = StreamLimits(lease_s=60.0)  # this process is busy while it makes millions of blocks
EVENT_BLOCKS = 32


class Server:
    """A NATS server with an empty store."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = nats_command(folder, self.port, ", max_file_store: 64GB, max_memory_store: 4GB")
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for_port(self.port)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"


class Indexer:
    """The service under test: `kvmesh indexer`."""

    def __init__(self, server: Server, namespace: str, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.log = folder / f"{namespace}-{self.port}.log"
        command = [sys.executable, "-m", "kvmesh.cli.main", "indexer", "--nats-url", server.url]
        command += ["--nats-namespace", namespace, "--metrics-port", str(self.port), *options]
        self.started = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def cpu_s(self) -> float:
        return cpu_seconds(self.process.pid)

    def metric(self, name: str) -> float:
        """A metric of the process; 0 before it listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=2) as page:
                text = page.read().decode()
        except OSError:
            return 0.0
        found = re.search(rf"^kvmesh_indexer_{name} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def reaches(self, name: str, value: float, timeout: float = 120.0) -> None:
        deadline = time.perf_counter() + timeout
        while await asyncio.to_thread(self.metric, name) < value:
            if time.perf_counter() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{name} did not reach {value}:\n{self.log.read_text()}")
            await asyncio.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Worker:
    """One worker's numbered events about chains of random blocks."""

    name: str
    rng: random.Random
    next: int = 0
    held: list[bytes] = field(default_factory=list)

    @property
    def instance(self) -> str:
        return f"{self.name}-1"

    def batch(self, events: list[KvEvent]) -> bytes:
        first, self.next = self.next, self.next + len(events)
        return encode(KvBatch(self.name, self.instance, 0, first, time.time(), events))

    def stored(self, local: bytes) -> Stored:
        """Store a whole prompt from its root; engine hashes are its sequence hashes."""
        return Stored(0, None, sequence_hashes(local, SALT), local, SALT)

    def turnover(self, keep: int) -> list[KvEvent]:
        """Store one more chain; beyond `keep` chains, remove the oldest."""
        stored = self.stored(self.rng.randbytes(8 * EVENT_BLOCKS))
        self.held.append(stored.engine)
        removed: list[KvEvent] = [Removed(0, self.held.pop(0))] if len(self.held) > keep else []
        return [stored, *removed]

    def card(self) -> Instance:
        return Instance(
            instance=self.instance,
            role=Role.WORKER,
            name=self.name,
            version="0",
            started=time.time(),
            model=ModelCard(name=MODEL, context=1 << 20, block_size=16, files=""),
            capacity=Capacity(blocks=1 << 20, max_sequences=1, max_batched_tokens=1),
        )


class Fleet:
    """Workers that hold leases for as long as the block lasts."""

    def __init__(self, bus: Bus, count: int) -> None:
        self.bus = bus
        self.workers = [Worker(f"w{n}", random.Random(n)) for n in range(count)]
        self._leases = [Lease(bus, worker.card(), LIMITS) for worker in self.workers]

    async def __aenter__(self) -> "Fleet":
        for lease in self._leases:
            await lease.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for lease in self._leases:
            await lease.close()

    async def publish(self, worker: Worker, batch: bytes) -> None:
        await self.bus.client.publish(self.bus.subjects.kv(MODEL, worker.name), batch)

    async def stored(self, count: int) -> None:
        """Wait until the stream has this many messages."""
        await self.bus.flush()
        while (await self.bus.js.stream_info(self.bus.subjects.kv_stream)).state.last_seq < count:
            await asyncio.sleep(0.05)


async def connect(server: Server, name: str) -> Bus:
    bus = await Bus.connect(BusOptions(url=server.url, namespace=name), "bench")
    await ensure_streams(bus, LIMITS)
    return bus


async def patiently(attempt: Callable[[], Awaitable[object]], timeout: float = 30.0) -> None:
    deadline = time.perf_counter() + timeout
    while True:
        try:
            await attempt()
        except BusError:
            if time.perf_counter() > deadline:
                raise
            await asyncio.sleep(0.01)
        else:
            return
