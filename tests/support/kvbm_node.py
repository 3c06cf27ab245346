"""A kvbm process for a test, with the workers of its node."""

import asyncio
import urllib.request

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    ControlReply,
    Dump,
    ExpectReturns,
    Instance,
    KvLayout,
    MessageDecoder,
)
from kvmesh.bus.streams.configuration import StreamLimits
from support.kvbm import TestWorker, find_kvbm, layout
from support.mesh import Mesh
from support.nats import free_port
from support.wait import PATIENCE_S, eventually

CONTROL_REPLY = MessageDecoder(ControlReply)

HOST_BYTES = 4 << 20
DISK_BYTES = 64 << 20
ALL_TO_DISK = {"KVMESH_KVBM_DISK_FREQUENCY": "1"}


class Node:
    """A kvbm process and the workers in this process that are attached to it."""

    def __init__(self, mesh: Mesh, bus: Bus, limits: StreamLimits) -> None:
        self.mesh = mesh
        self.bus = bus
        self.limits = limits
        self.port = free_port()
        self.card: Instance | None = None
        self.former: set[str] = set()
        self.workers: list[TestWorker] = []

    async def start(self, **env: str) -> Instance:
        env = {"KVMESH_KVBM_METRICS_PORT": str(self.port), **env}
        self.mesh.start("kvbm", "kv", **env)
        return await self.wait_for_card()

    async def restart(self, **env: str) -> Instance:
        """Kill and restart the kvbm, optionally with other settings."""
        self.mesh.kill("kv")
        return await self.start(**{**self.mesh.commands["kv"][1], **env})

    async def wait_for_card(self) -> Instance:
        self.card = await find_kvbm(self.bus, self.limits, self.former)
        self.former.add(self.card.instance)
        return self.card

    async def worker(self, shape: KvLayout | None = None) -> TestWorker:
        assert self.card is not None
        worker = TestWorker(self.bus, self.card, shape or layout())
        self.workers.append(worker)
        await worker.attach()
        return worker

    async def dump(self, rank: int) -> ControlReply:
        assert self.card is not None
        subject = self.bus.subjects.dump(self.card.instance)
        return await self.bus.request(subject, Dump(rank), CONTROL_REPLY, PATIENCE_S)

    async def control(self, command: object) -> ControlReply:
        assert self.card is not None
        subject = self.bus.subjects.ctl(self.card.instance)
        return await self.bus.request(subject, command, CONTROL_REPLY, PATIENCE_S)

    async def expect(self, message: ExpectReturns) -> None:
        assert self.card is not None
        self.bus.post(self.bus.subjects.returns(self.card.instance), message)
        await self.bus.flush()

    def metric(self, name: str, labels: str = "") -> float:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.port}/metrics", timeout=PATIENCE_S
        ) as answer:
            lines = answer.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith(f"kvmesh_kvbm_{name}"))
        return sum(float(value) for sample, _, value in found if labels in sample)

    async def wait_for_metric(self, name: str, value: float, labels: str = "") -> None:
        await eventually(
            lambda: asyncio.to_thread(lambda: self.metric(name, labels) == value),
            what=f"{name}{labels} is {value}",
        )

    async def on_disk(self, count: int) -> None:
        """Wait until `count` blocks are on disk and no move runs."""
        await self.wait_for_metric("blocks", count, 'tier="2"')
        await self.wait_for_metric("moving_blocks", 0)

    @property
    def log(self) -> str:
        return (self.mesh.folder / "kv.log").read_text()
