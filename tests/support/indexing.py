"""Indexer replicas inside the test's process, and queries to them."""

import asyncio
import struct
from contextlib import AsyncExitStack

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import MessageDecoder, OverlapQuery, OverlapReply
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.indexer.service import IndexerService
from kvmesh.indexer.snapshots.snapshot_store import SnapshotStore
from kvmesh.runtime.service import Service
from kvmesh.settings.schema import IndexerSettings, Settings
from support.events import MODEL, depths, prompt
from support.wait import eventually


class Replica:
    """One running replica; `stop` may be called repeatedly."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.indexer = IndexerService(service)
        self.task = asyncio.create_task(self.indexer.run())

    async def stop(self) -> None:
        self.service.stopping.set()
        await self.task
        await self.service.close()


class Replicas:
    """Starts replicas on one mesh."""

    def __init__(self, options: BusOptions, limits: StreamLimits, stack: AsyncExitStack) -> None:
        self._options = options
        self._limits = limits
        self._stack = stack

    async def start(self, settings: IndexerSettings | None = None, ready: bool = True) -> Replica:
        """Start another replica and wait until it is ready, unless `ready` is false."""
        bus = await Bus.connect(self._options, "indexer")
        service = Service(bus, Settings(indexer=settings or IndexerSettings()), "indexer")
        service.limits = self._limits
        self._stack.push_async_callback(service.close)
        replica = Replica(service)
        self._stack.push_async_callback(replica.stop)
        if ready:
            await eventually(lambda: replica.indexer.ready or replica.task.done())
            await bus.client.flush()  # the server knows its subscriptions now
        return replica


async def find_overlaps(bus: Bus, *blocks: int) -> dict[str, int]:
    """Number of leading blocks of a prompt that each instance holds, according to the mesh."""
    query = OverlapQuery([prompt(list(blocks))])
    return depths(
        await bus.request(bus.subjects.index(MODEL), query, MessageDecoder(OverlapReply), 10)
    )


async def eventually_overlaps(bus: Bus, blocks: list[int], expected: dict[str, int]) -> None:
    """Wait until the mesh returns this result."""

    async def matches() -> bool:
        try:
            found = await find_overlaps(bus, *blocks)
        except BusError as error:
            raise AssertionError(f"no reply: {error}") from error
        assert found == expected
        return True

    await eventually(matches, what=f"{blocks} held as {expected}")


async def overwrite_newest(bus: Bus, damage: bytes | None = None, version: int = 1) -> None:
    """Corrupt the newest snapshot in the middle, or change its format version."""
    slot = (await SnapshotStore(bus).slots("whole"))[0]
    data = bytearray(await SnapshotStore(bus).read(slot))
    if damage is None:
        data[8:10] = struct.pack("<H", version)
    else:
        data[len(data) // 2 : len(data) // 2 + len(damage)] = damage
    bucket = await bus.js.object_store(bus.subjects.index_bucket)
    await bucket.put(slot.name, bytes(data), {"covered": str(slot.covered)})
