"""Contract of the engines that prefetch; lengths are in blocks."""

import asyncio
import time

from kvmesh.bus.messages import Prefetch
from kvmesh.worker.adapters.prefetching.queue import MAX_PREFETCHES
from support.engines import StartedEngine, make_prefetch, prompt
from support.wait import eventually


def prefetch_of(
    started: StartedEngine, tokens: bytes, name: str = "p", **fields: object
) -> Prefetch:
    return make_prefetch(tokens, name, **{"salt": started.salt, **fields})


async def first_blocks_held(started: StartedEngine, tokens: bytes, count: int) -> None:
    """Wait until the engine holds the first `count` blocks of a prompt, by its events."""
    blocks = set(started.sequence(tokens)[:count])
    await eventually(lambda: blocks <= started.held_hashes, what=f"{count} blocks")


class PrefetchSuite:
    """Subclasses provide the fixture `started`, an engine whose cache is empty."""

    async def test_a_prefetch_loads_nothing_of_a_tenant_whose_salt_collides(
        self, started: StartedEngine
    ) -> None:
        tokens = started.prompt(4)
        await started.run("a", tokens, max_tokens=1, tenant="a" * 32)
        await eventually(lambda: started.load().cached_blocks == 4, what="the request's blocks")
        more = tokens + started.prompt(1.25, first=3)
        command = prefetch_of(started, more, tenant="b" * 32, compute=0)
        assert (await started.execute(command)).ok
        await eventually(lambda: not started.engine.abort("p"), what="it has ended")
        assert started.load().cached_blocks == 4
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


class SlicedPrefetchSuite(PrefetchSuite):
    """Contract of the engines that prefetch in slices; theirs have 1,024 tokens of context."""

    async def test_a_prefetch_computes_beside_a_running_request(
        self, started: StartedEngine
    ) -> None:
        """The request may end before the first slice where others load the machine: some tries."""
        alone = started.prompt(2, first=9)
        await started.run("before", alone, max_tokens=600)
        for number in range(5):
            beside, tokens = f"beside{number}", started.prompt(12, first=100 * number)
            started.submit(beside, alone, max_tokens=600)
            await started.wait_for_tokens(beside)
            command = prefetch_of(started, tokens, compute=12 * started.size)
            assert (await started.execute(command)).ok
            await first_blocks_held(started, tokens, 1)
            was_beside = not started.sink.finish(beside)
            await started.ended(beside)
            assert started.sink.tokens(beside) == started.sink.tokens("before")
            await first_blocks_held(started, tokens, 12)
            if was_beside:
                break
        assert was_beside
        assert not started.sink.tokens("p")

    async def test_what_a_prefetch_computed_before_its_request_is_cached(
        self, started: StartedEngine
    ) -> None:
        tokens, requests = started.prompt(25), started.load().requests
        assert (await started.execute(prefetch_of(started, tokens, compute=25 * started.size))).ok
        await eventually(lambda: len(started.held_hashes) >= 3, what="some slices")
        held = started.depth(tokens)
        await started.run("a", tokens, max_tokens=1)
        assert started.sink.cached("a") >= held
        assert started.load().requests == requests + 1, "slices are not counted"
        assert not started.engine.abort("p"), "the request is here"

    async def test_an_ended_prefetch_leaves_nothing_running(self, started: StartedEngine) -> None:
        for number in range(20):
            command = prefetch_of(started, prompt(480, first=number), compute=480, deadline_s=5.0)
            assert (await started.execute(command)).ok
            await asyncio.sleep(0)
            assert started.engine.abort("p")
        before = time.monotonic()
        await started.run("a", started.prompt(1), max_tokens=1)
        assert time.monotonic() - before < 30
        await started.wait_for_events()
        await eventually(lambda: not started.load().active_blocks, what="no block is in use")
