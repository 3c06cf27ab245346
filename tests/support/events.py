"""Publishers of numbered KV events and dumps, with their true contents."""

import struct
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import (
    Capacity,
    Cleared,
    ControlReply,
    Dump,
    Instance,
    KvBatch,
    KvEvent,
    MessageDecoder,
    ModelCard,
    NodeStore,
    OverlapReply,
    Removed,
    Role,
    Stored,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.hashing import salt, sequence_hashes

DUMPS = MessageDecoder(Dump)
MODEL = "m"
SALT = salt(MODEL)
OPAQUE = 0x5555


def pack(hashes: Iterable[int]) -> bytes:
    return array("Q", hashes).tobytes()


def prompt(blocks: Iterable[int]) -> bytes:
    """The packed sequence hashes of a prompt given by its local hashes."""
    return sequence_hashes(pack(blocks), SALT)


def depths(reply: OverlapReply, index: int = 0) -> dict[str, int]:
    """Number of leading blocks of a prompt that each instance holds, in all tiers."""
    rows = struct.iter_unpack("<5I", reply.rows[index])
    return {reply.ranks[rank].instance: sum(tiers) for rank, *tiers in rows}


class TierContents:
    """Contents of one tier: sequence hash of each block to its parent and its local hash.

    Each change returns its events. Engine hashes differ from sequence hashes.
    """

    def __init__(self, tier: int = 0) -> None:
        self.tier = tier
        self.blocks: dict[int, tuple[int | None, int]] = {}

    def depth(self, blocks: Iterable[int]) -> int:
        """Number of leading blocks held of this prompt: the correct answer of the index."""
        hashes = array("Q", prompt(blocks))
        return next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))

    def store(self, blocks: Sequence[int]) -> list[KvEvent]:
        """Store every block of a prompt; one event per run of new blocks."""
        hashes = array("Q", prompt(blocks))
        events: list[KvEvent] = []
        run: list[int] = []
        for i, hash_ in enumerate(hashes):
            if hash_ in self.blocks:
                run = self._close(run, events)
                continue
            self.blocks[hash_] = (hashes[i - 1] if i else None, blocks[i])
            run.append(hash_)
        self._close(run, events)
        return events

    def _close(self, run: list[int], events: list[KvEvent]) -> list[int]:
        if run:
            events.append(self._stored(run, detached=False))
        return []

    def _stored(self, run: list[int], detached: bool) -> Stored:
        before, _ = self.blocks[run[0]]
        parent = None if before is None or detached else before ^ OPAQUE
        engine = pack(hash_ ^ OPAQUE for hash_ in run)
        local = pack(self.blocks[hash_][1] for hash_ in run)
        return Stored(self.tier, parent, engine, local, SALT, before if detached else None)

    def drop(self, blocks: Iterable[int], keep: int = 0) -> list[KvEvent]:
        """Remove the blocks of this prompt after the first `keep`, even if shared."""
        hashes = [h for h in array("Q", prompt(blocks))[keep:] if h in self.blocks]
        return self._remove(hashes)

    def evict(self, choose: Callable[[list[int]], int]) -> list[KvEvent]:
        """Remove one block at any position of a prompt."""
        return self._remove([choose(list(self.blocks))] if self.blocks else [])

    def _remove(self, hashes: list[int]) -> list[KvEvent]:
        for hash_ in hashes:
            del self.blocks[hash_]
        return [Removed(self.tier, pack(hash_ ^ OPAQUE for hash_ in hashes))] if hashes else []

    def dump(self) -> list[KvEvent]:
        events: list[KvEvent] = [Cleared()]
        sent: set[int | None] = {None}
        for hash_, (before, _) in self.blocks.items():
            events.append(self._stored([hash_], detached=before not in sent))
            sent.add(hash_)
        return events


class Publisher:
    """One worker instance. `send` publishes each batch; tests replace it to inject faults."""

    rank = 0
    tier = 0

    def __init__(
        self, bus: Bus, limits: StreamLimits, name: str, instance: str, node: str = ""
    ) -> None:
        self.bus = bus
        self.name = name
        self.instance = instance
        self.node = node
        self.contents = TierContents(self.tier)
        self.next_event_id = 0
        self.dumps = 0
        self.lease = Lease(bus, self._card(), limits)
        self.send: Callable[[KvBatch], Awaitable[None]] = self.deliver
        self._subscription: Subscription | None = None

    def _card(self) -> Instance:
        return Instance(
            instance=self.instance,
            role=Role.WORKER,
            name=self.name,
            version="0",
            started=time.time(),
            model=ModelCard(name=MODEL, context=1 << 20, block_size=16, files=""),
            capacity=Capacity(blocks=1 << 20, max_sequences=1, max_batched_tokens=1),
            node=self.node,
        )

    async def open(self) -> None:
        subject = self.bus.subjects.dump(self.instance)
        self._subscription = await self.bus.serve(subject, DUMPS, self._on_dump)
        await self.lease.open()

    async def close(self) -> None:
        await self.lease.close()
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    async def _on_dump(self, message: Dump, reply: Reply) -> None:
        if message.digest:
            reply(ControlReply(False, "no digests"))
            return
        if message.rank == self.rank:
            self.dumps += 1
            await self.publish(self.contents.dump())
        else:
            await self.send(self._batch(message.rank, 0, [Cleared()]))
        reply(ControlReply(True))

    async def store(self, *blocks: int) -> None:
        """Store one prompt."""
        await self.publish(self.contents.store(blocks))

    async def drop(self, *blocks: int) -> None:
        """Remove that prompt."""
        await self.publish(self.contents.drop(blocks))

    async def publish(self, events: list[KvEvent]) -> None:
        batch = self._batch(self.rank, self.next_event_id, events)
        self.next_event_id += len(events)
        await self.send(batch)

    def _batch(self, rank: int, first: int, events: list[KvEvent]) -> KvBatch:
        return KvBatch(self.name, self.instance, rank, first, time.time(), events)

    async def deliver(self, batch: KvBatch) -> None:
        """Publish a batch to the stream without waiting for the acknowledgement."""
        self.bus.post(self.bus.subjects.kv(MODEL, self.name), batch)


class Kvbm(Publisher):
    """One kvbm instance with blocks of MODEL, its second model, in host memory."""

    rank = 1
    tier = 1

    def _card(self) -> Instance:
        return Instance(
            instance=self.instance,
            role=Role.KVBM,
            name=self.name,
            version="0",
            started=time.time(),
            node=self.node,
            store=NodeStore(
                directory="",
                tier_bytes=[1 << 30, 0, 0],
                models=["other", MODEL],
                layouts={MODEL: ["layout"]},
                key="key",
            ),
        )


async def discard(_: KvBatch) -> None:
    """Replacement for `send` that loses the batch."""
