"""The router service over a real bus, with a scripted index."""

import asyncio
import logging
import time
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest
from support.routers import (
    Tail,
    caught_up,
    query_router,
    request_placement,
    running_router,
    running_workers,
    scripted_index,
)
from support.routing import request, sequence
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.messages import (
    Decision,
    Hints,
    LearnedReport,
    Load,
    MessageDecoder,
    Outcome,
    OverlapQuery,
    OverlapReply,
    Placement,
    Refused,
    ReturnsReport,
    Routed,
    RouteEvent,
    RouteRequest,
    SeqAdd,
    SeqBatch,
    SeqFree,
    ShowLearned,
    ShowReturns,
    encode,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.returns.classes import MAX_WAITS
from kvmesh.returns.rates import BINS
from kvmesh.router.policies.base import Policy
from kvmesh.router.policies.registry import BUILT_IN
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel

TEN = sequence(*range(10))
DECISIONS = MessageDecoder(RouteEvent)
SEQUENCES = MessageDecoder(SeqBatch)


def decisions(bus: Bus) -> Tail[Decision]:
    return Tail(bus, bus.subjects.route_stream, bus.subjects.route("m"), DECISIONS)


def sequences(bus: Bus) -> Tail[SeqBatch]:
    return Tail(bus, bus.subjects.seq_stream, bus.subjects.seq("m"), SEQUENCES)


async def test_a_request_is_placed_on_the_rank_with_its_prefix(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {"b": (6,)})
    async with (
        running_workers(bus, limits, "a", "b"),
        running_router(options),
        decisions(bus) as routes,
        sequences(bus) as active,
    ):
        reply = await request_placement(bus, request("1", TEN, explain=True))
        assert (reply.instance, reply.rank, reply.overlap) == ("b", 0, [6, 0, 0, 0])
        await eventually(lambda: len(routes.seen) == 1 and len(active.seen) == 1)
        assert reply.decision == routes.seen[0]
        assert [c.instance for c in routes.seen[0].candidates] == ["b", "a"]
        (add,) = active.seen[0].events
        assert isinstance(add, SeqAdd)
        assert (add.request, add.instance, add.overlap) == ("1", "b", 6)


async def test_a_router_reports_what_it_has_learned_about_returns(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    waits, ended = ["tool", "Bash", "sleep", "64s"], time.time() + 1
    outcome = Outcome(
        request="1", instance="a", time=ended, cached_tokens=0, output_tokens=1, ttft_s=None,
        total_s=1.0, finish="tool_calls", waits_for=waits,
    )  # fmt: skip
    async with (
        running_workers(bus, limits, "a"),
        running_router(options) as router,
        decisions(bus) as routes,
    ):
        await request_placement(bus, request("1", TEN))
        await eventually(lambda: routes.seen, what="the decision")
        bus.post(bus.subjects.route("m"), outcome)
        subject, reports = bus.subjects.ask(router.service.instance), MessageDecoder(ReturnsReport)

        async def learned() -> ReturnsReport | None:
            report = await bus.request(subject, ShowReturns(), reports, PATIENCE_S)
            return report if report.classes else None

        report = await eventually(learned, what="the outcome is learned")
        assert report is not None
        found = sorted((each.model, each.waits) for each in report.classes)
        assert found == [("m", waits[:count]) for count in range(MAX_WAITS + 1)]
        assert all(each.prompts == pytest.approx(1.0, abs=0.1) for each in report.classes)
        assert {len(each.rates) for each in report.classes} == {BINS}
        assert {(check.model, check.observed) for check in report.checks} == {("m", 0)}
        learners = await bus.request(
            subject, ShowLearned(), MessageDecoder(LearnedReport), PATIENCE_S
        )
        assert {each.model for each in learners.learners} <= {"m"}


async def test_another_replica_counts_the_load_of_earlier_requests(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    async with running_workers(bus, limits, "a", "b"):
        async with running_router(options, "r1", predicted_ttl_s=0.0):
            pinned = Placement(instance="a")
            for name in ("1", "2"):
                await request_placement(bus, request(name, TEN, placement=pinned))
        async with running_router(
            options, "r2", predicted_ttl_s=0.0
        ) as second:  # r1 is gone: this one replays the stream
            assert (await request_placement(bus, request("3", TEN))).instance == "b"
            batch = SeqBatch("f", [SeqFree("1"), SeqFree("2")])
            await bus.js.context.publish(bus.subjects.seq("m"), encode(batch))
            await caught_up(bus, [second])
            reply = await request_placement(bus, request("4", TEN, explain=True))
            assert reply.instance == "a"


async def test_an_index_outage_is_logged_and_does_not_stop_routing(
    bus: Bus, options: BusOptions, limits: StreamLimits, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(_: OverlapQuery, __: Reply) -> None:
        return

    decoder = MessageDecoder(OverlapQuery)
    silent = await bus.serve(bus.subjects.index("m"), decoder, never, queue="index")
    async with (
        running_workers(bus, limits, "a", "b"),
        running_router(options, index_timeout_s=0.05),
    ):
        with caplog.at_level(logging.WARNING, "kvmesh.router"):
            reply = await request_placement(bus, request("1", TEN, explain=True))
            await request_placement(bus, request("2", TEN))
        assert reply.decision is not None
        assert "index unavailable" in (reply.decision.note or "")
        outages = [r for r in caplog.records if "without overlaps" in r.message]
        assert len(outages) == 1
        await silent.unsubscribe()
        await scripted_index(bus, {"a": (10,)})

        async def overlaps_again() -> bool:
            return (await request_placement(bus, request("3", TEN))).overlap == [10, 0, 0, 0]

        await eventually(overlaps_again)


async def test_an_intermittent_index_is_logged_once(
    bus: Bus, options: BusOptions, limits: StreamLimits, caplog: pytest.LogCaptureFixture
) -> None:
    answered = count()

    async def at_times(query: OverlapQuery, reply: Reply) -> None:
        if next(answered) % 2:
            reply(OverlapReply([], [b""] * len(query.prompts)))

    decoder = MessageDecoder(OverlapQuery)
    await bus.serve(bus.subjects.index("m"), decoder, at_times, queue="index")
    async with (
        running_workers(bus, limits, "a", "b"),
        running_router(options, index_timeout_s=0.05),
    ):
        with caplog.at_level(logging.INFO, "kvmesh.router.index_client"):
            for number in range(8):
                await request_placement(bus, request(str(number), TEN))
    logged = [r.message for r in caplog.records if r.name == "kvmesh.router.index_client"]
    assert len([line for line in logged if "without overlaps" in line]) == 1


async def test_requests_do_not_wait_for_each_others_index_queries(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    held: list[Reply] = []

    async def hold(_: OverlapQuery, reply: Reply) -> None:
        held.append(reply)

    decoder = MessageDecoder(OverlapQuery)
    await bus.serve(bus.subjects.index("m"), decoder, hold, queue="index")
    async with running_workers(bus, limits, "a"), running_router(options, index_timeout_s=1.0):
        await request_placement(bus, request("0", b"", tokens=3))
        asked = [asyncio.create_task(request_placement(bus, request("1", TEN)))]
        await eventually(lambda: len(held) == 1)
        asked.append(asyncio.create_task(request_placement(bus, request("2", TEN))))
        await eventually(lambda: len(held) == 2)
        await asyncio.gather(*asked)


async def test_a_lone_request_is_placed_at_once_if_no_other_is_looked_up(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    held: list[Reply] = []

    async def hold(_: OverlapQuery, reply: Reply) -> None:
        held.append(reply)

    decoder = MessageDecoder(OverlapQuery)
    await bus.serve(bus.subjects.index("m"), decoder, hold, queue="index")
    gathers: dict[str, Any] = {"gather_s": 100 * PATIENCE_S, "index_timeout_s": PATIENCE_S}
    async with running_workers(bus, limits, "a"), running_router(options, **gathers) as running:
        alone = asyncio.create_task(request_placement(bus, request("1", TEN, alone=True)))
        await eventually(lambda: len(held) == 1)
        held[0](OverlapReply([], [b""]))
        assert isinstance(await alone, Routed)
        queue = running.router._models["m"].queue
        for name in "23":
            bus.post(bus.subjects.router("m"), request(name, TEN, alone=True))
        await eventually(lambda: len(held) == 3)
        assert not queue.gathering
        held[1](OverlapReply([], [b""]))
        await eventually(lambda: queue.gathering)


async def test_refusals_have_a_reason(bus: Bus, options: BusOptions, limits: StreamLimits) -> None:
    async with running_router(options):
        async with running_workers(bus, limits, "a"):
            await request_placement(bus, request("1", TEN))
            bad = await query_router(bus, request("2", TEN, policy="fastest"))
            assert isinstance(bad, Refused)
            assert (bad.code, "fastest" in bad.reason) == ("invalid", True)
            answer = await bus.client.request(bus.subjects.router("m"), b"\xc1", timeout=PATIENCE_S)
            assert msgspec.msgpack.decode(answer.data, type=Refused).code == "invalid"

        async def left() -> bool:
            reply = await query_router(bus, request("3", TEN))
            assert isinstance(reply, Refused)
            assert (reply.code, reply.reason) == ("no_workers", "no worker serves this model")
            return True

        await eventually(left)


async def test_a_loaded_rank_gets_fewer_requests(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    await scripted_index(bus, {})
    load = Load(
        instance="a", rank=0, running=9, waiting=9, active_blocks=900, cached_blocks=0,
        total_blocks=1024, prefill_tokens=9000, steps=0, prompt_tokens=0, cached_tokens=0,
        output_tokens=0, requests=0,
    )  # fmt: skip
    async with running_workers(bus, limits, "a", "b"), running_router(options):
        await request_placement(bus, request("0", TEN))
        bus.post(bus.subjects.load("a"), load)

        async def seen() -> bool:
            reply = await request_placement(bus, request("1", TEN, explain=True))
            assert reply.decision is not None
            by_name = {c.instance: c for c in reply.decision.candidates}
            return by_name["a"].decode >= 900

        await eventually(seen)


class FailingPolicy(Policy):
    """Fails in every method."""

    def choose(self, candidates: Candidates, model: CostModel, rng: Random) -> PolicyChoice:
        raise RuntimeError("choose")

    def on_placed(self, decision: Decision, now: float) -> None:
        raise RuntimeError("placed")

    def on_freed(self, request: str, now: float) -> None:
        raise RuntimeError("freed")

    def admits(self, request: RouteRequest, now: float) -> bool:
        raise RuntimeError("admits")

    def queue_boost_s(self, request: RouteRequest) -> float:
        raise RuntimeError("shift")

    def tick(self, now: float) -> None:
        raise RuntimeError("tick")


async def test_each_kind_of_policy_failure_is_logged_once(
    bus: Bus, options: BusOptions, limits: StreamLimits, caplog: pytest.LogCaptureFixture
) -> None:
    def failing_hooks() -> list[str]:
        return sorted(str(r.exc_info[1]) for r in caplog.records if r.exc_info)

    async with (
        running_workers(bus, limits, "a"),
        running_router(options, policy=f"{__name__}:FailingPolicy", queue_threshold=1.0) as running,
    ):
        for name in ("1", "2", "3"):
            assert isinstance(await query_router(bus, request(name, TEN)), Routed)
            bus.post(bus.subjects.seq("m"), SeqBatch("f", [SeqFree(name)]))
        await caught_up(bus, [running])
        await eventually(lambda: "tick" in failing_hooks())
    assert failing_hooks() == ["admits", "choose", "freed", "placed", "shift", "tick"]


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
async def test_every_policy_serves(
    bus: Bus, options: BusOptions, limits: StreamLimits, policy: str
) -> None:
    await scripted_index(bus, {"a": (4,)})
    async with running_workers(bus, limits, "a", "b"), running_router(options, policy=policy):
        for number in range(8):
            message = request(str(number), sequence(number, 1, 2), hints=Hints(session="s"))
            assert (await request_placement(bus, message)).instance in "ab"


async def test_without_kv_events_the_index_is_not_queried(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    async with running_workers(bus, limits, "a", "b"), running_router(options, kv_events=False):
        home = (await request_placement(bus, request("1", TEN))).instance
        bus.post(bus.subjects.seq("m"), SeqBatch("f", [SeqFree("1")]))

        async def known() -> bool:
            reply = await request_placement(bus, request("2", TEN, explain=True))
            assert reply.decision is not None
            assert reply.decision.note is None
            by_name = {c.instance: c.overlap[0] for c in reply.decision.candidates}
            return by_name[home] == 10

        await eventually(known)
