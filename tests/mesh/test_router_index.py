"""A router among indexers of which one is silent or late: placements still use overlaps."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest_asyncio
from support.routers import QUERIES, request_placement, running_router, running_workers
from support.routing import overlaps, request, sequence
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.discovery.directory import READY
from kvmesh.bus.discovery.leases import STATE, Lease
from kvmesh.bus.messages import (
    Instance,
    OverlapQuery,
    OverlapReply,
    Role,
)
from kvmesh.bus.streams.configuration import StreamLimits

HELD = overlaps({"a": (10,)})


class Indexer:
    """Replies that worker "a" holds ten blocks of every prompt, unless `silent`."""

    def __init__(self, name: str) -> None:
        self.instance = name
        self.silent = False
        self.prompts = 0

    def answer(self, query: OverlapQuery, reply: Reply) -> None:
        self.prompts += len(query.prompts)
        if not self.silent:
            reply(OverlapReply(HELD.ranks, [HELD.rows] * len(query.prompts)))


@asynccontextmanager
async def indexer(bus: Bus, limits: StreamLimits, name: str) -> AsyncIterator[Indexer]:
    made = Indexer(name)
    await bus.serve(bus.subjects.index_at(name), QUERIES, made.answer)
    card = Instance(
        instance=name,
        role=Role.INDEXER,
        name=name,
        version="0",
        started=0.0,
        labels={STATE: READY},
    )
    lease = Lease(bus, card, limits)
    await lease.open()
    yield made
    await lease.close()


@pytest_asyncio.fixture
async def two(bus: Bus, options: BusOptions, limits: StreamLimits) -> AsyncIterator[list[Indexer]]:
    """Two indexers, a router and two workers; the router has queried both indexers."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(indexer(bus, limits, n)) for n in ("i0", "i1")]
        await stack.enter_async_context(running_workers(bus, limits, "a", "b"))
        await stack.enter_async_context(
            running_router(options, predicted_ttl_s=0.0, index_timeout_s=1.0)
        )

        async def both_queried() -> bool:
            await _overlap(bus)
            return all(each.prompts for each in found)

        await eventually(both_queried)
        yield found


async def _overlap(bus: Bus) -> int:
    """Number of blocks of a prompt that the chosen rank holds."""
    routed = await request_placement(bus, request("q", sequence(*range(10))))
    return sum(routed.overlap)


async def test_a_silent_indexer_costs_no_overlaps_and_is_excluded(
    bus: Bus, two: list[Indexer]
) -> None:
    two[0].silent = True
    for _ in range(8):
        assert await _overlap(bus) == 10
    before = two[0].prompts
    for _ in range(8):
        assert await _overlap(bus) == 10
    assert two[0].prompts == before


async def test_an_indexer_that_answers_again_is_queried_again(bus: Bus, two: list[Indexer]) -> None:
    two[0].silent = True
    for _ in range(4):
        await _overlap(bus)
    two[0].silent = False
    before = two[0].prompts

    async def queried_again() -> bool:
        await _overlap(bus)
        return two[0].prompts > before

    await eventually(queried_again)
