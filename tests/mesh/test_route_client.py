"""Route queries to routers that fall silent, leave or return: one lasting position in the queue."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest_asyncio
from support.nats import NatsServer
from support.proxy import Proxy
from support.routers import (
    RunningRouter,
    Tail,
    running_workers,
    scripted_index,
    start_router,
)
from support.routing import request, sequence
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.peer_choice import TURN_S, Peers
from kvmesh.bus.discovery.ping import answer_pings
from kvmesh.bus.messages import (
    Decision,
    Instance,
    MessageDecoder,
    Refused,
    Role,
    Routed,
    RouteRequest,
    SeqBatch,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher

DECISIONS: MessageDecoder[Decision] = MessageDecoder(Decision)
QUEUE = {"queue_threshold": 0.5, "predicted_ttl_s": 0.0}
DEADLINE_S = 10 * PATIENCE_S  # entries leave the ledger before their time is over
Answers = list[asyncio.Task[Routed | Refused]]


class Clock:
    """The time by which a frontend chooses a router."""

    def __init__(self) -> None:
        self.now = 0.0
        self._turns = Peers(1.0)

    def know(self, router: RunningRouter) -> None:
        self._turns.joined(router.service.instance)

    def set_turn_of(self, router: RunningRouter) -> None:
        instance = router.service.instance
        while self._turns.choose_at(self.now) != instance:
            self.now += TURN_S


@dataclass
class Stage:
    """Two routers of one worker with capacity for one prompt of ten blocks at a time.

    They have their turns at queries one after the other.
    """

    bus: Bus
    route_client: RouteClient
    proxy: Proxy
    routers: list[RunningRouter]
    decisions: Tail[Decision]
    clock: "Clock"
    attempts: dict[str, list[str]] = field(default_factory=dict)

    def query(self, name: str, blocks: int = 10) -> "asyncio.Task[Routed | Refused]":
        """Query for a placement, as the frontend does for a request."""
        self.clock.set_turn_of(self.routers[len(self.attempts) % len(self.routers)])
        number = 100 * len(self.attempts)
        attempts = self.attempts[name] = [name]

        def compose(anew: bool, arrived: float | None) -> RouteRequest:
            if anew:
                attempts.append(f"{name}.{len(attempts)}")
            prompt = sequence(*range(number, number + blocks))
            return request(attempts[-1], prompt, deadline_s=DEADLINE_S, arrived=arrived)

        return asyncio.create_task(self.route_client.request("m", compose, DEADLINE_S))

    async def fill(self) -> None:
        """Fill the worker with a request that every router counts."""
        assert isinstance(await self.query("first"), Routed)
        # a router replies before it informs the others
        await eventually(lambda: all(self.active(router) == 1 for router in self.routers))

    async def queue_requests(self, count: int) -> Answers:
        """Query for more placements, each once the previous one is queued."""
        tasks = []
        for number in range(count):
            tasks.append(self.query(f"q{number}"))
            await self.all_queues_hold(number + 1)
        return tasks

    async def all_queues_hold(self, waiting: int) -> None:
        """Wait until every router sees `waiting` requests in the queue."""
        await eventually(lambda: all(self.waiting(r) == waiting for r in self.routers))

    async def serves(self, router: RunningRouter) -> None:
        """Wait until a router may be queried."""
        await eventually(lambda: router.service.instance in self.route_client.routers)
        await eventually(lambda: router.router._router("m")._subscriptions)
        await router.service.bus.flush()  # the server knows them too

    def waiting(self, router: RunningRouter) -> int:
        return router.router._router("m").queue.waiting

    def own(self, router: RunningRouter) -> int:
        return len(router.router._router("m").queue.own_tickets)

    def active(self, router: RunningRouter) -> int:
        return len(router.router._router("m").core.active)

    async def free_in_turn(self, count: int) -> list[str]:
        """Free capacity for one request after the other; return the requests in their order."""
        for number in range(count):
            done = SeqPrefilled(self.decisions.seen[-1].request)
            self.bus.post(self.bus.subjects.seq("m"), SeqBatch("f", [done]))
            await self._placed(number + 2)
        return [d.request.partition(".")[0] for d in self.decisions.seen[1:]]

    async def _placed(self, count: int) -> None:
        await eventually(lambda: len(self.decisions.seen) >= count)


@asynccontextmanager
async def _route_client(bus: Bus, limits: StreamLimits, clock: Clock) -> AsyncIterator[RouteClient]:
    tracker = SequenceEventPublisher(bus, "f")
    query_client = RouteClient(bus, tracker, lambda: clock.now)
    directory = Directory(bus, limits, query_client.joined, query_client.left)
    await query_client.open()
    await directory.open()
    tasks = [asyncio.create_task(query_client.run()), asyncio.create_task(tracker.run())]
    yield query_client
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await directory.close()


@pytest_asyncio.fixture
async def stage(
    nats_server: NatsServer, bus: Bus, options: BusOptions, limits: StreamLimits
) -> AsyncIterator[Stage]:
    proxy = Proxy(nats_server.port)
    proxy.start()
    await scripted_index(bus, {})
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_workers(bus, limits, "a", step=160))
        decisions = await stack.enter_async_context(
            Tail[Decision](bus, bus.subjects.route_stream, bus.subjects.route("m"), DECISIONS)
        )
        clock = Clock()
        query_client = await stack.enter_async_context(_route_client(bus, limits, clock))
        through = replace(options, url=proxy.url)
        routers = [
            await start_router(through, "r0", **QUEUE),
            await start_router(options, "r1", **QUEUE),
        ]
        stage = Stage(bus, query_client, proxy, routers, decisions, clock)
        for router in routers:
            clock.know(router)
            await stage.serves(router)
        yield stage
        proxy.release()
        for router in routers:
            if not router.task.done():
                await router.stop()
    await asyncio.to_thread(proxy.stop)


async def test_a_query_without_a_reply_goes_to_another_router(stage: Stage) -> None:
    stage.proxy.hold()
    answers = [await stage.query(f"q{number}", blocks=1) for number in range(2)]
    assert all(isinstance(answer, Routed) for answer in answers)
    assert not stage.route_client.routers.trusts(stage.routers[0].service.instance)


async def test_a_silent_router_is_trusted_again_once_it_replies(stage: Stage) -> None:
    stage.proxy.hold()
    for number in range(2):
        await stage.query(f"q{number}", blocks=1)
    stage.proxy.release()
    instance = stage.routers[0].service.instance
    await eventually(lambda: stage.route_client.routers.trusts(instance))


async def test_requests_queued_in_a_silent_router_keep_their_order(stage: Stage) -> None:
    await stage.fill()
    tasks = await stage.queue_requests(6)
    assert stage.own(stage.routers[0])
    stage.proxy.hold()
    await eventually(lambda: stage.own(stage.routers[1]) == 6)
    await eventually(lambda: stage.waiting(stage.routers[1]) == 6)
    assert await stage.free_in_turn(6) == [f"q{number}" for number in range(6)]
    assert all(isinstance(answer, Routed) for answer in await asyncio.gather(*tasks))


async def test_a_thawed_router_places_no_request_that_others_have_placed(stage: Stage) -> None:
    await stage.fill()
    tasks = await stage.queue_requests(6)
    stage.proxy.hold()
    await eventually(lambda: stage.own(stage.routers[1]) == 6)
    await stage.free_in_turn(6)
    await asyncio.gather(*tasks)
    stage.proxy.release()
    await eventually(lambda: stage.own(stage.routers[0]) == 0)
    # each request counts once, as its last attempt
    await eventually(lambda: [stage.active(router) for router in stage.routers] == [7, 7])


async def test_requests_queued_in_a_leaving_router_keep_their_order(stage: Stage) -> None:
    await stage.fill()
    tasks = await stage.queue_requests(8)
    assert stage.own(stage.routers[0])
    await stage.routers[0].stop()
    await eventually(lambda: stage.own(stage.routers[1]) == 8)
    assert stage.waiting(stage.routers[1]) == 8
    assert await stage.free_in_turn(8) == [f"q{number}" for number in range(8)]
    assert all(isinstance(answer, Routed) for answer in await asyncio.gather(*tasks))
    assert [d.request for d in stage.decisions.seen] == ["first", *(f"q{n}" for n in range(8))]


async def test_after_a_lost_connection_each_request_still_waits_and_counts_once(
    stage: Stage,
) -> None:
    await stage.fill()
    tasks = await stage.queue_requests(4)
    for _ in range(3):
        for reconnected in stage.bus.on_reconnect:
            reconnected()
        await stage.bus.flush()
    assert await stage.free_in_turn(4) == [f"q{number}" for number in range(4)]
    assert all(isinstance(answer, Routed) for answer in await asyncio.gather(*tasks))
    assert all(len(names) == 1 for names in stage.attempts.values())
    await eventually(lambda: [stage.active(router) for router in stage.routers] == [5, 5])


async def test_cancelled_queries_are_not_placed(stage: Stage) -> None:
    await stage.fill()
    tasks = await stage.queue_requests(3)
    stage.proxy.hold()
    await eventually(lambda: stage.own(stage.routers[1]) == 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    given_up: list[SeqEvent] = [
        SeqFree(names[-1]) for names in stage.attempts.values() if names[0] != "first"
    ]
    stage.bus.post(stage.bus.subjects.seq("m"), SeqBatch("f", given_up))
    stage.proxy.release()
    await eventually(lambda: [stage.waiting(router) for router in stage.routers] == [0, 0])
    assert [d.request for d in stage.decisions.seen] == ["first"]
    assert [stage.active(router) for router in stage.routers] == [1, 1]


async def test_a_full_queue_does_not_refuse_requests_queued_before(
    stage: Stage, options: BusOptions
) -> None:
    await stage.fill()
    tasks = await stage.queue_requests(4)
    full = await start_router(options, "r2", **QUEUE, queue_limit=1)
    await stage.serves(full)
    for router in stage.routers:
        await router.stop()
    await eventually(lambda: stage.own(full) == 4)
    assert isinstance(await stage.query("one more"), Refused)
    assert await stage.free_in_turn(4) == [f"q{number}" for number in range(4)]
    await asyncio.gather(*tasks)
    await full.stop()


async def test_without_any_router_a_query_is_refused_at_once(
    bus: Bus, limits: StreamLimits
) -> None:
    async with _route_client(bus, limits, Clock()) as query_client:

        def compose(_: bool, arrived: float | None) -> RouteRequest:
            return request("q", sequence(1), arrived=arrived)

        answer = await query_client.request("m", compose, DEADLINE_S)
        assert isinstance(answer, Refused)
        assert answer.code == "unavailable"


async def test_a_reply_that_a_router_lost_with_its_connection_is_sent_again(stage: Stage) -> None:
    replies: list[bytes] = []
    inbox = stage.bus.new_inbox()
    await stage.bus.subscribe_raw(inbox, lambda msg: replies.append(msg.data))
    router = stage.routers[0]
    subject = stage.bus.subjects.router_at("m", router.service.instance)
    stage.bus.post(subject, request("q", sequence(1), deadline_s=DEADLINE_S), inbox)
    await eventually(lambda: len(replies) == 1)
    for reconnected in router.service.bus.on_reconnect:
        reconnected()
    await eventually(lambda: len(replies) == 2)
    assert replies[0] == replies[1]


async def test_a_query_that_was_lost_is_sent_again_to_a_router_that_replies(
    bus: Bus, limits: StreamLimits
) -> None:
    received: list[str] = []

    def answer(query: RouteRequest, reply: Reply) -> None:
        received.append(query.request)
        if len(received) > 1:  # the first one is lost
            reply(Refused(code="no_workers", reason="none"))

    card = Instance(instance="r-1", role=Role.ROUTER, name="r", version="0", started=0.0)
    decoder: MessageDecoder[RouteRequest] = MessageDecoder(RouteRequest)
    await bus.serve(bus.subjects.router_at("m", "r-1"), decoder, answer)
    await answer_pings(bus, "r-1")
    lease = Lease(bus, card, limits)
    await lease.open()
    async with _route_client(bus, limits, Clock()) as query_client:
        await eventually(lambda: "r-1" in query_client.routers)

        def compose(_: bool, arrived: float | None) -> RouteRequest:
            return request("q", sequence(1), arrived=arrived)

        assert isinstance(await query_client.request("m", compose, DEADLINE_S), Refused)
        assert query_client.routers.trusts("r-1")
    assert received == ["q", "q"]
    await lease.close()
