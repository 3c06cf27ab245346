"""The processes of a simulated mesh: the project's own services over a simulated connection."""

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import cast

from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.connection.direct_client import DirectClient
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Capacity, ControlReply, Dump, Instance, ModelCard, Role, Stored
from kvmesh.bus.streams.configuration import ensure_streams
from kvmesh.bus.streams.publisher import KvPublisher
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.index.fingerprints import HashRun, fingerprints
from kvmesh.indexer.service import IndexerService
from kvmesh.router.service import RouterService
from kvmesh.runtime.service import Service
from kvmesh.settings.schema import IndexerSettings, RouterSettings, Settings, StreamSettings
from kvmesh.worker.health.rank_digests import digest_reply
from support.events import DUMPS, MODEL, TierContents
from support.simulation.loop import NODE
from support.simulation.network import Network, SimClient

log = logging.getLogger("kvmesh.simulation")
BLOCK = 16
STEP_TOKENS = 64  # small, so that few requests make a queue
BACKLOG_BYTES = 8 << 10  # small, so that an outage overflows it
OUTAGES = (BusError, OSError, TimeoutError)  # errors that may end a process
SETTINGS = Settings(
    router=RouterSettings(
        seed=1, sequence_ttl_s=12.0, rescore_s=2.0, starvation_s=5.0, queue_quantum=128
    ),
    indexer=IndexerSettings(snapshot_threshold=60, check_interval_s=1.0),
    streams=StreamSettings(lease_s=3.0),
)


@dataclass
class Process:
    """One instance of one process."""

    kind: str
    name: str
    node: str
    client: SimClient
    bus: Bus
    ended: bool = False
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        self.service = Service(self.bus, SETTINGS, self.name)
        self.service.instance = self.node

    async def main(self) -> None:
        """Run until the process fails, as under a supervisor that restarts it."""
        try:
            await ensure_streams(self.bus, self.service.limits)
            await self.run()
        except OUTAGES as error:
            log.warning("process ended: %r", error)
        except Exception:
            log.exception("process failed")
        finally:
            self.ended = True
        await self.service.close()

    async def run(self) -> None:
        raise NotImplementedError


class RouterProcess(Process):
    """A complete router."""

    router: RouterService | None = None

    async def run(self) -> None:
        self.router = RouterService(self.service)
        await self.router.run()

    def known_workers(self) -> set[str]:
        """The workers to which the router can send requests."""
        return set(self.router._model_of) if self.router is not None else set()


class IndexerProcess(Process):
    """A complete index replica, including snapshots."""

    indexer: IndexerService | None = None

    async def run(self) -> None:
        self.indexer = IndexerService(self.service)
        await self.indexer.run()


class AuditorProcess(Process):
    """Reads whole streams and stores their messages since creation by stream sequence."""

    ready = False

    async def run(self) -> None:
        subjects = self.bus.subjects
        self.read: dict[str, dict[int, bytes]] = {}
        for stream, subject in (
            (subjects.kv_stream, subjects.kv_all),
            (subjects.seq_stream, subjects.seq_all),
        ):
            await self._follow(stream, subject)
        self.ready = True
        await self.service.stopping.wait()

    async def _follow(self, stream: str, subject: str) -> None:
        read = self.read[stream] = {}

        def receive(message: StreamMessage) -> None:
            if message.seq <= max(read, default=0):
                log.error("%s: %d read after %d", stream, message.seq, max(read))
            read[message.seq] = message.data

        await StreamReader(self.bus, stream, subject, receive, Start(), read.clear).open()


class WorkerProcess(Process):
    """An engine's cache and the real publisher of its events."""

    contents: TierContents
    publisher: KvPublisher
    ready = False

    async def run(self) -> None:
        self.contents = TierContents()
        self.context = copy_context()
        subject = self.bus.subjects.kv(MODEL, self.name)
        self.publisher = KvPublisher(
            self.bus, subject, self.name, self.node, 0.005, self._dump, BACKLOG_BYTES
        )
        self.publisher.start()
        await self.bus.serve(self.bus.subjects.dump(self.node), DUMPS, self._on_dump)
        lease = Lease(self.bus, self._card(), self.service.limits)
        await lease.open()
        self.ready = True
        await self.service.stopping.wait()

    def _card(self) -> Instance:
        return Instance(
            instance=self.node,
            role=Role.WORKER,
            name=self.name,
            version="0",
            started=time.time(),
            model=ModelCard(name=MODEL, context=1 << 20, block_size=BLOCK, files=""),
            capacity=Capacity(blocks=1 << 20, max_sequences=64, max_batched_tokens=STEP_TOKENS),
        )

    def _dump(self, rank: int) -> None:
        self.publisher.add(rank, self.contents.dump())

    def _on_dump(self, message: Dump, reply: Reply) -> None:
        if message.digest:
            stored = [event for event in self.contents.dump() if isinstance(event, Stored)]
            blocks = fingerprints(HashRun(e.tier, e.engine, e.local) for e in stored)
            next_event = self.publisher.next_event(message.rank)
            reply(digest_reply(blocks, next_event, message.listed, 1 << 20))
            return
        self._dump(message.rank)
        reply(ControlReply(True))

    def store(self, blocks: Sequence[int]) -> None:
        """Store a prompt that the engine has computed."""
        self.publisher.add(0, self.contents.store(blocks))

    def evict(self, choose: Callable[[list[int]], int]) -> None:
        """Evict a block at any position of a prompt."""
        if events := self.contents.evict(choose):
            self.publisher.add(0, events)

    def clear(self) -> None:
        """Drop all blocks of the engine."""
        self.contents.blocks.clear()
        self.publisher.add(0, self.contents.dump())


KINDS: dict[str, type[Process]] = {
    "router": RouterProcess,
    "indexer": IndexerProcess,
    "worker": WorkerProcess,
    "auditor": AuditorProcess,
}


def connect(network: Network, node: str) -> tuple[SimClient, Bus]:
    """The connection of a node that is about to start."""
    context = copy_context()
    context.run(NODE.set, node)
    client = SimClient(network, node)
    bus = context.run(Bus, cast(DirectClient, client), BusOptions(namespace="sim"))
    client.bus = bus
    return client, bus
