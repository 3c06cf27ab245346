"""A node's kvbm in the mesh: the index holds its blocks, and the router credits its workers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest_asyncio
from support.events import Kvbm, Publisher, discard, prompt
from support.indexing import Replicas, eventually_overlaps, find_overlaps
from support.routers import request_placement, running_router
from support.routing import request
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.settings.schema import IndexerSettings as Settings

TIERS = {"a-1": [2, 3, 0, 0], "b-1": [0, 0, 0, 5], "c-1": [0, 0, 0, 0]}


@pytest_asyncio.fixture
async def replicas(options: BusOptions, limits: StreamLimits, bus: Bus) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        yield Replicas(options, limits, stack)


@pytest_asyncio.fixture
async def holders(bus: Bus, limits: StreamLimits) -> AsyncIterator[dict[str, Publisher]]:
    """Workers on nodes a, b and c; the first two nodes have a kvbm."""
    workers = [Publisher(bus, limits, f"{n}", f"{n}-1", node=n) for n in "abc"]
    kvbms = [Kvbm(bus, limits, f"k{n}", f"k{n}-1", node=n) for n in "ab"]
    for holder in (*workers, *kvbms):
        await holder.open()
    yield {holder.name: holder for holder in (*workers, *kvbms)}
    for holder in (*workers, *kvbms):
        await holder.close()


async def credited(bus: Bus, blocks: list[int], expected: dict[str, list[int]]) -> None:
    """Wait until a decision has these overlaps."""

    async def matches() -> bool:
        message = request("r", prompt(blocks), policy="round-robin", explain=True)
        decision = (await request_placement(bus, message)).decision
        assert decision is not None
        assert {c.instance: c.overlap for c in decision.candidates} == expected
        return True

    await eventually(matches, what=f"overlaps {expected}")


async def test_workers_are_credited_with_blocks_of_their_node(
    bus: Bus, options: BusOptions, replicas: Replicas, holders: dict[str, Publisher]
) -> None:
    await replicas.start()
    await holders["a"].store(1, 2)
    await holders["ka"].store(1, 2, 3, 4, 5)
    async with running_router(options, predicted_ttl_s=0.0):
        await credited(bus, [1, 2, 3, 4, 5, 6], TIERS)
        await holders["ka"].close()
        none = [0, 0, 0, 0]
        await credited(bus, [1, 2, 3], {"a-1": [2, 0, 0, 0], "b-1": none, "c-1": none})
        assert await find_overlaps(bus, 1, 2, 3) == {"a-1": 2}


async def test_gaps_are_healed_by_a_dump_and_snapshots_survive(
    bus: Bus, options: BusOptions, replicas: Replicas, holders: dict[str, Publisher]
) -> None:
    first = await replicas.start(Settings(snapshot_threshold=10))
    kvbm = holders["ka"]
    await eventually(lambda: kvbm.dumps, what="the dump requested of an idle holder")
    dumps_before = kvbm.dumps
    kvbm.send = discard
    await kvbm.store(7)
    kvbm.send = kvbm.deliver
    await holders["a"].store(1, 2)
    await kvbm.store(1, 2, 3, 4, 5)
    await eventually_overlaps(bus, [1, 2, 3, 4, 5], {"a-1": 2, "ka-1": 5})
    assert await find_overlaps(bus, 7) == {"ka-1": 1}
    assert kvbm.dumps > dumps_before
    for block in range(100, 112):
        await kvbm.store(block)
    await eventually(lambda: first.indexer.snapshotter.counts.snapshots)
    dumps_before = kvbm.dumps
    await first.stop()
    second = await replicas.start(Settings())
    assert second.indexer.snapshotter.covered > 0
    await eventually_overlaps(bus, [1, 2, 3, 4, 5], {"a-1": 2, "ka-1": 5})
    assert kvbm.dumps == dumps_before
    async with running_router(options, predicted_ttl_s=0.0):
        await credited(bus, [1, 2, 3, 4, 5, 6], TIERS)
