"""Turns of a session send their new hashes only, and are placed as if they had sent all."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from support.events import MODEL, SALT, Publisher, prompt
from support.indexing import Replica, Replicas, eventually_overlaps
from support.routers import RunningRouter, Tail, start_router
from support.routing import request
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions, RawMessage
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import (
    Decision,
    Hints,
    MessageDecoder,
    OverlapQuery,
    Routed,
    RouteEvent,
    RouteRequest,
    SeqBatch,
    SeqFree,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.hashing import HASH_BYTES
from kvmesh.prompt_delta.hashes import ReceivedHashes
from kvmesh.settings.schema import IndexerSettings

HELD = 160
REQUESTS, QUERIES = MessageDecoder(RouteRequest), MessageDecoder(OverlapQuery)
DECISIONS: MessageDecoder[Decision] = MessageDecoder(RouteEvent)


@asynccontextmanager
async def frontend(bus: Bus, limits: StreamLimits) -> AsyncIterator[RouteClient]:
    events = SequenceEventPublisher(bus, "f")
    client = RouteClient(bus, events)
    directory = Directory(bus, limits, client.joined, client.left)
    await client.open()
    await directory.open()
    tasks = [asyncio.create_task(client.run()), asyncio.create_task(events.run())]
    yield client
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await directory.close()


@dataclass
class Stage:
    """A worker that holds the first HELD blocks of a session, an indexer and a router.

    `asked` and `queried` are the hashes of each route request and overlap query on the bus.
    """

    bus: Bus
    options: BusOptions
    indexers: list[Replica]
    client: RouteClient
    routers: list[RunningRouter]
    decisions: Tail[Decision]
    asked: list[int] = field(default_factory=list)
    queried: list[int] = field(default_factory=list)

    async def watch(self) -> None:
        subjects = self.bus.subjects
        for router in self.routers:
            subject = subjects.router_at(MODEL, router.service.instance)
            await self.bus.subscribe_raw(subject, self._on_request)
        for indexer in self.indexers:
            subject = subjects.index_at(indexer.service.instance)
            await self.bus.subscribe_raw(subject, self._on_query)

    def _on_request(self, msg: RawMessage) -> None:
        self.asked.append(len(REQUESTS.decode(msg.data).sequence_hashes) // HASH_BYTES)

    def _on_query(self, msg: RawMessage) -> None:
        prompts = QUERIES.decode(msg.data).prompts
        if prompts:
            self.queried.append(sum(map(len, prompts)) // HASH_BYTES)

    async def turn(self, blocks: int, client: RouteClient | None = None) -> None:
        """Place a prompt of so many blocks; it must find the blocks that the worker holds."""
        hashes = prompt(range(1, blocks + 1))
        message = request(
            f"{time.monotonic_ns()}", hashes, hints=Hints(session="s"), salt=SALT, alone=True
        )
        routed = await (client or self.client).request(
            MODEL, lambda _new, _arrived: message, PATIENCE_S
        )
        assert isinstance(routed, Routed)
        assert sum(routed.overlap) == HELD
        await eventually(lambda: self._decided(message.request) == hashes)
        ended = SeqBatch("f", [SeqFree(message.request)])
        self.bus.post(self.bus.subjects.seq(MODEL), ended)

    def _decided(self, name: str) -> bytes | None:
        made = (d for d in self.decisions.seen if isinstance(d, Decision) and d.request == name)
        return next((decision.sequence_hashes for decision in made), None)


@pytest_asyncio.fixture(params=[1, 2], ids=["whole", "sharded"])
async def stage(
    request: pytest.FixtureRequest, bus: Bus, options: BusOptions, limits: StreamLimits
) -> AsyncIterator[Stage]:
    worker = Publisher(bus, limits, "w", "w-1")
    await worker.open()
    await worker.store(*range(1, HELD + 1))
    async with AsyncExitStack() as stack:
        replicas = Replicas(options, limits, stack)
        count: int = request.param
        indexers = [
            await replicas.start(IndexerSettings(shards=count, shard=number, shard_by="root"))
            for number in range(count)
        ]
        await eventually_overlaps(bus, list(range(1, HELD + 1)), {"w-1": HELD})
        decisions = await stack.enter_async_context(
            Tail[Decision](bus, bus.subjects.route_stream, bus.subjects.route(MODEL), DECISIONS)
        )
        client = await stack.enter_async_context(frontend(bus, limits))
        stage = Stage(bus, options, indexers, client, [], decisions)
        await add_router(stage, "r0")
        yield stage
        for router in stage.routers:
            await router.stop()
    await worker.close()


async def add_router(stage: Stage, name: str) -> None:
    router = await start_router(stage.options, name, predicted_ttl_s=0.0)
    stage.routers.append(router)
    instance = router.service.instance
    await eventually(lambda: instance in stage.client.routers)
    await eventually(lambda: router.router._router(MODEL)._subscriptions)
    await eventually(
        lambda: len(router.router._router(MODEL).index.indexers.instances) == len(stage.indexers)
    )
    await router.service.bus.flush()
    await stage.watch()


async def settle(stage: Stage) -> None:
    """Let the session's prompt reach every indexer."""
    for _ in stage.indexers:
        await stage.turn(HELD)
    stage.asked.clear()
    stage.queried.clear()


async def test_a_turn_sends_its_new_hashes_only(stage: Stage) -> None:
    await settle(stage)
    await stage.turn(HELD + 10)
    await eventually(lambda: stage.asked == [10] and stage.queried == [10])


async def test_what_is_evicted_is_sent_again(stage: Stage) -> None:
    await settle(stage)
    stage.routers[0].router._router(MODEL)._prompts = ReceivedHashes()
    await stage.turn(HELD + 10)
    await eventually(lambda: stage.asked == [10, HELD + 10])
    for indexer in stage.indexers:
        indexer.indexer.queries._prompts = ReceivedHashes()
    for more in range(2, 5):
        await stage.turn(HELD + 10 * more)
    await eventually(lambda: stage.asked[2:] == [10, 10, 10])
    assert max(stage.queried) > HELD


async def test_a_router_that_is_started_anew_gets_the_whole_prompt(stage: Stage) -> None:
    await settle(stage)
    await stage.routers.pop().stop()
    await eventually(lambda: not stage.client.routers.instances)
    await add_router(stage, "r1")
    await stage.turn(HELD + 10)
    await eventually(lambda: stage.asked == [HELD + 10])


async def test_two_frontends_of_one_session(stage: Stage, bus: Bus, limits: StreamLimits) -> None:
    await settle(stage)
    async with frontend(bus, limits) as other:
        await eventually(lambda: other.routers.instances)
        for more in range(1, 4):
            await stage.turn(HELD + 20 * more, other)
            await stage.turn(HELD + 20 * more + 10)


async def test_routers_and_indexers_of_the_previous_build_get_whole_prompts(stage: Stage) -> None:
    stage.client._completing.clear()
    stage.routers[0].router._router(MODEL).index._completing.clear()
    for more in range(1, 4):
        await stage.turn(HELD + 10 * more)
    sizes = [HELD + 10, HELD + 20, HELD + 30]
    await eventually(lambda: stage.asked == sizes and stage.queried == sizes)
