"""A NATS server and a kvbm for measurements, and a worker's use of them."""

import asyncio
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from local_mesh import free_port, nats_command, wait_for_port

from kvmesh._native import xxh3
from kvmesh.blocks.attachment import WorkerIdentity
from kvmesh.blocks.kvbm_client import KvbmClient, KvbmPrompt, TierSpeeds
from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import KvLayout
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams

NODE = "bench"
LIMITS = StreamLimits()


@dataclass
class Node:
    """A NATS server and a kvbm, and connections to them."""

    folder: Path
    port: int
    kvbm: list[str]

    def __post_init__(self) -> None:
        self.server = subprocess.Popen(
            nats_command(self.folder, self.port), stderr=subprocess.DEVNULL
        )
        wait_for_port(self.port)
        command = [sys.executable, "-m", "kvmesh.cli.main", "kvbm", "--node", NODE]
        command += ["--nats-url", self.url, *self.kvbm]
        with (self.folder / "kvbm.log").open("wb") as log:
            self.manager = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def connect(self, name: str) -> Bus:
        bus = await Bus.connect(BusOptions(url=self.url), name)
        await ensure_streams(bus, LIMITS)
        return bus

    def stop(self) -> None:
        for process in (self.manager, self.server):
            process.terminate()
            process.wait(20)


@contextmanager
def node(folder: Path, *kvbm: str) -> Iterator[Node]:
    running = Node(folder, free_port(), list(kvbm))
    try:
        yield running
    finally:
        running.stop()


async def until(check: Callable[[], object], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


def numbered(name: str, blocks: int, seed: int) -> KvbmPrompt:
    """A prompt whose blocks have numbers as names."""
    hashes = array("Q", range(seed << 32, (seed << 32) + blocks)).tobytes()
    digests = b"".join((seed << 64 | i).to_bytes(16, "little") for i in range(blocks))
    return KvbmPrompt(
        request=name, digests=digests, sequence_hashes=hashes, local=hashes, salt=seed
    )


async def attach(bus: Bus, layout: KvLayout) -> KvbmClient:
    tenant = WorkerIdentity(node=NODE, instance="bench", model="bench", layout=layout)
    client = KvbmClient(bus, LIMITS, tenant)
    await client.open()
    await until(lambda: client.key is not None)
    return client


async def write(client: KvbmClient, prompt: KvbmPrompt) -> None:
    size = client.worker.layout.block_bytes
    async with client.writing(prompt, 0) as writing:
        assert writing is not None
        for block, offset in zip(writing.blocks, writing.offsets, strict=True):
            view = writing.arena.view(offset, size)
            view[:8] = (block + 1).to_bytes(8, "little")
            writing.checksums.append(xxh3(view))


async def read(client: KvbmClient, prompt: KvbmPrompt) -> list[int]:
    """Load a whole prompt into the arena; returns its blocks by source tier."""
    tiers = [0] * 4
    async with aclosing(client.load(prompt, 0, TierSpeeds(), 0.0, 60.0)) as parts:
        async for part in parts:
            for tier in part.tiers:
                tiers[tier] += 1
    return tiers
