"""Several routers act as one; losing one loses no lasting state."""

import asyncio
import time
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from support.routers import (
    RunningRouter,
    Tail,
    caught_up,
    query_router,
    request_placement,
    running_router,
    running_workers,
    scripted_index,
    start_router,
)
from support.routing import request, sequence
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import (
    Decision,
    Hints,
    MessageDecoder,
    Routed,
    RouteEvent,
    SeqAdd,
    SeqBatch,
    SeqFree,
    SeqPrefilled,
    SeqWait,
    Thresholds,
    encode,
)
from kvmesh.bus.streams.configuration import StreamLimits

DECISIONS = MessageDecoder(RouteEvent)
SEQUENCES = MessageDecoder(SeqBatch)
BURST = 500
WORKERS = ("a", "b", "c", "d")


def prompts(kind: str) -> list[tuple[str, bytes]]:
    """Names and prompts that agree in 40 blocks and differ in 8."""
    shared = range(40)
    return [
        (f"{kind}{n}", sequence(*shared, *(1000 * n + i for i in range(8)))) for n in range(BURST)
    ]


async def burst(bus: Bus, kind: str) -> Counter[str]:
    """Place 500 requests at once; returns how many each worker got."""
    replies = await asyncio.gather(
        *(query_router(bus, request(name, blocks), timeout=20) for name, blocks in prompts(kind))
    )
    assert all(isinstance(reply, Routed) for reply in replies)
    return Counter(reply.instance for reply in replies if isinstance(reply, Routed))


async def test_three_routers_place_a_burst_as_one_does(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {"a": (40,), "b": (10,)})
    async with running_workers(bus, limits, *WORKERS):
        alone = await start_router(options, "r0", queue_threshold=0.0)
        one = await burst(bus, "one")
        await freed(bus, [alone], *(name for name, _ in prompts("one")))
        others = [await start_router(options, f"r{n}", queue_threshold=0.0) for n in (1, 2)]
        async with Tail[Decision](
            bus, bus.subjects.route_stream, bus.subjects.route("m"), DECISIONS
        ) as routes:
            await all_serve(bus, routes, [alone, *others])
            three = await burst(bus, "three")
            await eventually(lambda: len(_of_burst(routes)) == BURST)
            deciders = Counter(d.router for d in _of_burst(routes))
        assert len(deciders) == 3
        moved = sum(abs(one[w] - three[w]) for w in WORKERS) / 2
        assert moved <= 0.1 * BURST, (one, three)
        for router in (alone, *others):
            await router.stop()


async def all_serve(bus: Bus, routes: Tail[Decision], routers: list[RunningRouter]) -> None:
    """Wait until each router has placed a request, and no router counts a running one."""
    probes: list[str] = []

    async def seen() -> bool:
        probes.append(f"probe{len(probes)}")
        await query_router(bus, request(probes[-1], b"", tokens=1))
        return {r.service.instance for r in routers} <= {d.router for d in routes.seen}

    await eventually(seen)
    await eventually(lambda: set(probes) <= {d.request for d in routes.seen})
    await freed(bus, routers, *(d.request for d in routes.seen))


async def freed(bus: Bus, routers: list[RunningRouter], *requests: str) -> None:
    """Free these requests, and wait until all routers have read it."""
    batch = SeqBatch("f", [SeqFree(request) for request in requests])
    await bus.js.context.publish(bus.subjects.seq("m"), encode(batch))
    await caught_up(bus, routers)


def _of_burst(routes: Tail[Decision]) -> list[Decision]:
    return [d for d in routes.seen if d.request.startswith("three")]


async def test_siblings_in_all_routers_wait_for_the_one_that_computes(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    prefix = sequence(*range(10_000))  # half a minute at the speed that routers assume
    prompts = {f"sibling{n}": prefix + sequence(n) for n in range(9)}
    async with running_workers(bus, limits, "a"):
        routers = [await start_router(options, f"r{n}", queue_threshold=0.0) for n in range(2)]
        async with Tail[Decision](
            bus, bus.subjects.route_stream, bus.subjects.route("m"), DECISIONS
        ) as routes:
            await all_serve(bus, routes, routers)
            await request_placement(bus, request("first", prefix))
            await caught_up(bus, routers)
            waiting = [
                asyncio.create_task(
                    query_router(bus, request(name, blocks, deadline_s=60.0), timeout=30)
                )
                for name, blocks in prompts.items()
            ]
            queues = [running.router._models["m"].queue for running in routers]
            await eventually(lambda: sum(queue.waiting for queue in queues) == len(prompts))
            assert not any(task.done() for task in waiting)
            bus.post(bus.subjects.seq("m"), SeqBatch("f", [SeqPrefilled("first")]))
            assert all(isinstance(reply, Routed) for reply in await asyncio.gather(*waiting))
            await eventually(lambda: prompts.keys() <= {d.request for d in routes.seen})
            placed = [d for d in routes.seen if d.request in prompts]
        assert {wait.request for d in placed for wait in d.prefix_waits} == {"first"}
        assert len({d.router for d in placed}) == 2
        for router in routers:
            await router.stop()


async def test_a_killed_router_loses_no_accounting(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    blocks = sequence(*range(10))
    async with running_workers(bus, limits, "a", "b"):
        settings = {"predicted_ttl_s": 0.0, "queue_threshold": 0.0}
        first = await start_router(options, "r1", **settings)
        homes = [(await request_placement(bus, request(str(n), blocks))).instance for n in range(6)]
        second = await start_router(options, "r2", **settings)
        await first.kill()

        async def loads() -> dict[str, int]:
            reply = await query_router(bus, request("probe", b"", tokens=1, explain=True))
            await freed(bus, [second], "probe")
            assert isinstance(reply, Routed)
            assert reply.decision is not None
            assert reply.decision.router == second.service.instance
            return {c.instance: c.requests for c in reply.decision.candidates}

        async def counted() -> bool:
            return await loads() == dict(Counter(homes))

        await eventually(counted)
        await freed(bus, [second], "0", "1")
        assert sum((await loads()).values()) == 4

        await second.stop()


async def test_a_request_that_is_never_freed_is_given_up(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    settings = {"sequence_ttl_s": 2.0, "predicted_ttl_s": 0.0, "queue_threshold": 0.0}
    async with running_workers(bus, limits, "a"):
        router = await start_router(options, "r1", **settings)
        await request_placement(bus, request("lost", sequence(*range(10))))

        async def given_up() -> bool:
            reply = await request_placement(bus, request("probe", b"", tokens=1, explain=True))
            await freed(bus, [router], "probe")
            assert reply.decision is not None
            return reply.decision.chosen.requests == 0

        await eventually(given_up)
        await router.stop()


async def test_sessions_are_known_to_every_replica_and_after_a_restart(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    session = {"policy": "session", "session_mode": "hard"}
    async with running_workers(bus, limits, *WORKERS):
        first = await start_router(options, "r1", **session)
        message = request("1", b"", tokens=9, hints=Hints(session="s"))
        home = (await request_placement(bus, message)).instance
        await first.stop()
        second = await start_router(options, "r2", **session)
        for number in range(12):
            again = msgspec.structs.replace(message, request=f"again{number}")
            assert (await request_placement(bus, again)).instance == home
        await second.stop()


async def test_busy_thresholds_change_while_running(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    bucket = await bus.js.key_value(bus.subjects.router_bucket)
    key = bus.subjects.busy_key("m")
    async with running_workers(bus, limits, "a"):
        router = await start_router(options, "r1")
        await request_placement(bus, request("1", sequence(*range(10))))
        await bucket.put(key, msgspec.msgpack.encode(Thresholds(blocks=10)))

        async def overloaded() -> bool:
            reply = await query_router(bus, request("2", sequence(1)))
            return getattr(reply, "code", "") == "overloaded"

        await eventually(overloaded)
        await bucket.delete(key)
        await eventually(lambda: placed_now(bus))
        await router.stop()


async def placed_now(bus: Bus) -> bool:
    return isinstance(await query_router(bus, request("3", sequence(1))), Routed)


async def test_waiting_requests_leave_in_one_order_over_all_routers(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    subject = bus.subjects.seq("m")
    queue = {"queue_threshold": 0.5, "predicted_ttl_s": 0.0, "priority_shift_s": 1000.0}
    async with (
        running_workers(bus, limits, "a", step=160),
        Tail[Decision](
            bus, bus.subjects.route_stream, bus.subjects.route("m"), DECISIONS
        ) as routes,
        Tail[SeqBatch](bus, bus.subjects.seq_stream, subject, SEQUENCES) as active,
    ):
        routers = [await start_router(options, f"r{n}", **queue) for n in range(3)]
        await all_serve(bus, routes, routers)
        probes = len(routes.seen)
        await request_placement(bus, request("first", sequence(*range(10))))
        await eventually(lambda: "first" in _added(active))
        await caught_up(bus, routers)
        priorities = [(7 * n) % 15 for n in range(15)]
        tasks = []
        for n, priority in enumerate(priorities):
            blocks = sequence(n + 1, *range(9))
            message = request(f"p{priority}", blocks, hints=Hints(priority=priority), deadline_s=60)
            tasks.append(asyncio.create_task(query_router(bus, message, timeout=60)))
        await eventually(lambda: len(_waiting(active)) == 15)
        # The server deals requests out at random: all fifteen on one router is a 1 in 10⁷ chance.
        assert len({w.router for w in _waiting(active)}) > 1
        await caught_up(bus, routers)
        for turn in range(16):
            await eventually(lambda n=turn: len(routes.seen) == probes + 1 + n)  # type: ignore[misc]
            done = SeqPrefilled(routes.seen[-1].request)
            bus.post(subject, SeqBatch("f", [done]))
        await asyncio.gather(*tasks)
        order = [d.request for d in routes.seen[probes:]]
        assert order == ["first", *(f"p{n}" for n in reversed(range(15)))]
        for router in routers:
            await router.stop()


def _added(active: Tail[SeqBatch]) -> set[str]:
    return {e.request for batch in active.seen for e in batch.events if isinstance(e, SeqAdd)}


def _waiting(active: Tail[SeqBatch]) -> list[SeqWait]:
    return [e for batch in active.seen for e in batch.events if isinstance(e, SeqWait)]


async def test_a_router_whose_clock_is_set_publishes_the_new_time(
    bus: Bus, options: BusOptions, limits: StreamLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_workers(bus, limits, "a"), running_router(options) as running:
        await request_placement(bus, request("x", sequence(1)))
        [model] = running.router._models.values()
        before, clock = model.core.epoch, time.time
        later = SimpleNamespace(time=lambda: clock() + 3600)
        monkeypatch.setattr("kvmesh.router.model_router.time", later)
        await eventually(lambda: model.core.epoch > before + 3599)
