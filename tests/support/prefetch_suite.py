"""Contract of the engines that prefetch; lengths are in blocks."""

import time

from kvmesh.bus.messages import Prefetch
from kvmesh.worker.adapters.prefetching.queue import MAX_PREFETCHES
from support.engines import StartedEngine, make_prefetch
from support.wait import eventually


def prefetch_of(
    started: StartedEngine, tokens: bytes, name: str = "p", **fields: object
) -> Prefetch:
    return make_prefetch(tokens, name, **{"salt": started.salt, **fields})


class PrefetchSuite:
    """Subclasses provide the fixture `started`, an engine whose cache is empty."""

    async def test_a_prefetch_loads_nothing_of_a_tenant_whose_salt_collides(
        self, started: StartedEngine
    ) -> None:
        tokens = started.prompt(4)
        await started.run("a", tokens, max_tokens=1, tenant="a" * 32)
        cached = started.load().cached_blocks
        more = tokens + started.prompt(1.25, first=3)
        command = prefetch_of(started, more, tenant="b" * 32, compute=0)
        assert (await started.execute(command)).ok
        await eventually(lambda: not started.engine.abort("p"), what="it has ended")
        assert started.load().cached_blocks == cached
        await started.run("b", tokens, max_tokens=1, tenant="b" * 32)
        assert started.sink.cached("b") == 0

    async def test_prefetches_of_one_owner_give_way_to_those_of_others(
        self, started: StartedEngine
    ) -> None:
        tokens, later = started.prompt(6.25), time.time() + 3600

        async def prefetch(name: str, tenant: str, at: float = later) -> str:
            command = prefetch_of(started, tokens, name, at=at, tenant=tenant)
            return (await started.execute(command)).reason

        for number in range(MAX_PREFETCHES):
            assert not await prefetch(f"greedy{number}", f"greedy/{number}", later + number)
        full = f"{MAX_PREFETCHES} prefetches are in progress"
        assert await prefetch("more", "greedy/new") == full
        assert not await prefetch("modest", "modest")
        assert not started.engine.abort(f"greedy{MAX_PREFETCHES - 1}"), "the last one was replaced"
        assert started.engine.abort("modest")
        assert not await prefetch("one", "modest/part")
        assert started.engine.abort("one")
        for number in range(MAX_PREFETCHES - 1):
            started.engine.abort(f"greedy{number}")

    async def test_a_prefetch_computes_a_bounded_number_of_tokens_without_output(
        self, started: StartedEngine
    ) -> None:
        tokens = started.prompt(12.5)
        await started.run("a", started.prompt(2.5), max_tokens=1)
        held = set(started.sequence(started.prompt(2.5)))
        await eventually(lambda: started.held_hashes == held, what="the events of the request")
        compute = int(4.4 * started.size)
        assert not (await started.execute(prefetch_of(started, tokens, compute=compute))).reason
        there = set(started.sequence(tokens)[: 2 + 4])
        await eventually(lambda: started.held_hashes == there, timeout=30, what="they are computed")
        await eventually(lambda: not started.engine.abort("p"), timeout=30, what="it has ended")
        assert list(started.sink.deltas) == ["a"]
        await started.run("b", tokens, max_tokens=1)
        assert started.sink.cached("b") == 6 * started.size

    async def test_a_prefetch_waits_for_its_time_and_ends_when_it_is_of_no_use(
        self, started: StartedEngine
    ) -> None:
        tokens, later = started.prompt(6.25), time.time() + 3600
        other = started.prompt(6.25, first=5)
        for name, of in (("p", tokens), ("q", tokens), ("other", other)):
            command = prefetch_of(started, of, name, at=later, compute=6 * started.size)
            assert (await started.execute(command)).ok
        assert started.engine.abort("q")
        assert not started.engine.abort("q")
        longer = tokens + started.prompt(1.25, first=7)
        await started.run("a", longer, max_tokens=1)
        assert not started.engine.abort("p"), "the request is here"
        assert started.engine.abort("other")
        held = set(started.sequence(longer))
        await eventually(lambda: started.held_hashes == held, what="the request's blocks")

    async def test_a_prefetch_that_comes_to_nothing_is_refused(
        self, started: StartedEngine
    ) -> None:
        short, fitting = started.prompt(0.9), started.prompt(3.1)
        reasons = [
            (await started.execute(unfit)).reason
            for unfit in (prefetch_of(started, short), prefetch_of(started, fitting, rank=9))
        ]
        assert reasons == ["the prompt has no full block", "there is no rank 9"]
        started.submit("p", fitting, max_tokens=400)
        reply = await started.execute(prefetch_of(started, fitting))
        assert reply.reason == "a request has this id"
        assert started.engine.abort("p")
