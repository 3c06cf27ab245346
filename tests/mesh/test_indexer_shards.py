"""A divided index on a real bus: every shard's replica gives whole replies."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Literal

import pytest
import pytest_asyncio
from support.events import MODEL, Publisher, depths, prompt
from support.indexing import Replicas, eventually_overlaps, find_overlaps
from support.nats import NatsServer
from support.proxy import Proxy
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import MessageDecoder, OverlapQuery, OverlapReply
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.index.interface import Buffer, PrefixIndex
from kvmesh.runtime.service import StartError
from kvmesh.settings.schema import IndexerSettings as Settings

OVERLAP_REPLY = MessageDecoder(OverlapReply)

PROMPTS = [(i, i + 1, i + 2) for i in range(1, 40, 3)]


@pytest_asyncio.fixture
async def replicas(options: BusOptions, limits: StreamLimits, bus: Bus) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        yield Replicas(options, limits, stack)


@pytest.mark.parametrize("by", ["root", "namespace"])
async def test_shards_together_equal_one_index(
    bus: Bus, limits: StreamLimits, replicas: Replicas, by: Literal["root", "namespace"]
) -> None:
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    for blocks in PROMPTS:
        await worker.store(*blocks)
    parts = [
        await replicas.start(Settings(shards=3, shard=number, shard_by=by)) for number in range(3)
    ]
    query = OverlapQuery([prompt(blocks) for blocks in PROMPTS] + [b""])
    for _ in range(10):  # any replica that the server picks
        reply = await bus.request(bus.subjects.index(MODEL), query, OVERLAP_REPLY, PATIENCE_S)
        assert [depths(reply, i) for i in range(len(PROMPTS))] == [{"w-1": 3}] * len(PROMPTS)
        assert reply.rows[-1] == b""
    held = [part.indexer.states.index.stats().blocks for part in parts]
    assert sum(held) == 3 * len(PROMPTS)
    assert max(held) < sum(held) or by == "namespace"
    await worker.close()


async def test_prompts_of_a_missing_shard_have_no_overlaps(
    bus: Bus, limits: StreamLimits, replicas: Replicas
) -> None:
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    for blocks in PROMPTS:
        await worker.store(*blocks)
    part = await replicas.start(Settings(shards=2, shard=1, shard_by="root"))
    found = [bool(await find_overlaps(bus, *blocks)) for blocks in PROMPTS]
    assert True in found
    assert False in found
    assert part.indexer.queries.counts.shard_errors == found.count(False)
    await replicas.start(Settings(shards=2, shard=0, shard_by="root"))
    for blocks in PROMPTS:
        await eventually_overlaps(bus, list(blocks), {"w-1": 3})
    await worker.close()


async def test_a_silent_replica_of_a_shard_costs_no_overlaps(
    nats_server: NatsServer,
    bus: Bus,
    options: BusOptions,
    limits: StreamLimits,
    replicas: Replicas,
) -> None:
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    for blocks in PROMPTS:
        await worker.store(*blocks)
    proxy = Proxy(nats_server.port)
    proxy.start()
    async with AsyncExitStack() as stack:
        behind = Replicas(replace(options, url=proxy.url), limits, stack)
        part = Settings(shards=2, shard=1, shard_by="root")
        silent, other = await behind.start(part), await replicas.start(part)
        queried = await replicas.start(
            Settings(shards=2, shard=0, shard_by="root", shard_timeout_s=2.0)
        )
        both = {each.indexer._service.instance for each in (silent, other)}
        known = queried.indexer.queries._replicas
        await eventually(lambda: all(name in known["root-1of2"] for name in both))
        proxy.hold()
        subject = bus.subjects.index_at(queried.indexer._service.instance)
        for blocks in PROMPTS * 2:
            query = OverlapQuery([prompt(blocks)])
            reply = await bus.request(subject, query, OVERLAP_REPLY, PATIENCE_S)
            assert depths(reply) == {"w-1": 3}
        assert not known["root-1of2"].trusts(silent.indexer._service.instance)
        assert queried.indexer.queries.counts.shard_errors == 0
        proxy.release()
        await eventually(lambda: known["root-1of2"].trusts(silent.indexer._service.instance))
    await asyncio.to_thread(proxy.stop)
    await worker.close()


async def test_an_invalid_shard_is_refused_at_start(replicas: Replicas) -> None:
    with pytest.raises(StartError, match="shard 2 of 2"):
        await replicas.start(Settings(shards=2, shard=2))


class SlowIndex:
    """An index on which every store takes a while, as on a machine with too little to spare."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.seconds = 0.0

    def store(
        self, rank: int, tier: int, parent: int | None, engine: Buffer, local: Buffer, salt: int
    ) -> bool:
        time.sleep(self.seconds)
        return self._index.store(rank, tier, parent, engine, local, salt)

    def __getattr__(self, name: str) -> object:
        return getattr(self._index, name)


async def test_a_lagging_replica_withdraws_and_comes_back(
    bus: Bus, limits: StreamLimits, replicas: Replicas
) -> None:
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    replica = await replicas.start(Settings(lag_limit_s=0.5))
    slow = SlowIndex(replica.indexer.states.index)
    replica.indexer.states.index = slow  # type: ignore[assignment]
    await worker.store(1)
    await eventually_overlaps(bus, [1], {"w-1": 1})
    slow.seconds = 0.01

    async def publish() -> None:
        for i in range(2, 400):
            await worker.store(i)
        await bus.flush()

    await asyncio.gather(publish(), eventually(lambda: not replica.indexer.ready))
    slow.seconds = 0.0
    await eventually(lambda: replica.indexer.ready)
    await eventually_overlaps(bus, [399], {"w-1": 1})
    await worker.close()
