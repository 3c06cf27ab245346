"""Tests that every engine must pass: subclass the suite next to a fixture named `started`.

Lengths are in blocks, since engines support different block sizes.
"""

import asyncio
from array import array

import pytest

from kvmesh.bus.messages import Sampling
from kvmesh.worker.abilities import undeclared
from kvmesh.worker.engine import Rejected
from support.engines import StartedEngine
from support.wait import PATIENCE_S, eventually


class EngineSuite:
    """An engine of 64 blocks, 4 sequences at once, and a context of 512 tokens."""

    async def test_its_info_and_load_are_complete(self, started: StartedEngine) -> None:
        info = started.info
        assert (info.context, info.capacity.blocks, info.capacity.max_sequences) == (512, 64, 4)
        assert len(started.engine.load("i")) == info.capacity.dp_ranks

    async def test_its_abilities_are_the_declared_ones(self, started: StartedEngine) -> None:
        assert not undeclared(started.engine, started.info)

    async def test_tokens_stream_and_end(self, started: StartedEngine) -> None:
        await started.run("a", started.prompt(2.5))
        assert len(started.sink.tokens("a")) == 12
        assert started.sink.finish("a") == "length"
        assert len(started.sink.deltas["a"]) > 2
        assert started.sink.cached("a") == 0

    async def test_the_same_prompt_has_the_same_output(self, started: StartedEngine) -> None:
        await started.run("a", started.prompt(2.5))
        await started.run("b", started.prompt(2.5))
        assert started.sink.tokens("a") == started.sink.tokens("b")

    async def test_a_stop_token_ends_the_output(self, started: StartedEngine) -> None:
        await started.run("a", started.prompt(2.5))
        tokens = started.sink.tokens("a")
        sampling = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=[tokens[4]])
        await started.run("b", started.prompt(2.5), sampling=sampling)
        assert started.sink.finish("b") == "stop"
        assert started.sink.tokens("b") == tokens[: tokens.index(tokens[4]) + 1]

    async def test_output_of_another_worker_is_continued(self, started: StartedEngine) -> None:
        await started.run("a", started.prompt(2.5))
        tokens = started.sink.tokens("a")
        longer = started.prompt(2.5) + array("I", tokens[:5]).tobytes()
        await started.run("b", longer, generated=5)
        assert started.sink.tokens("b") == tokens[5:]

    async def test_an_aborted_request_ends_with_abort(self, started: StartedEngine) -> None:
        before = started.load().aborted
        started.submit("a", started.prompt(2.5), max_tokens=400)
        await started.wait_for_tokens("a")
        assert started.engine.abort("a")
        assert not started.engine.abort("a")
        assert not started.engine.abort("never")
        await asyncio.wait_for(started.engine.drain(), PATIENCE_S)
        assert started.sink.finish("a") == "abort"
        assert (started.load().aborted, started.load().active_blocks) == (before + 1, 0)

    async def test_a_batch_has_the_output_of_single_requests(self, started: StartedEngine) -> None:
        before = started.load().requests
        await started.run("alone", started.prompt(2.2, first=3))
        names = [f"r{i}" for i in range(10)]
        for i, name in enumerate(names):
            started.submit(name, started.prompt(2.2, first=i))
        await started.ended(*names)
        assert started.sink.tokens("r3") == started.sink.tokens("alone")
        assert all(len(started.sink.tokens(name)) == 12 for name in names)
        assert started.load().requests == before + 11

    async def test_higher_priority_overtakes_waiting_requests(self, started: StartedEngine) -> None:
        for i in range(4):
            started.submit(f"busy{i}", started.prompt(1.3, first=i), max_tokens=60)
        await eventually(lambda: len(started.sink.order) == 4)
        for name, priority in (("low", 0), ("high", 5), ("late", 5), ("lowest", -3)):
            tokens = started.prompt(1.3, first=len(name))
            started.submit(name, tokens, max_tokens=30, priority=priority)
        await started.ended("low", "high", "late", "lowest")
        order = [name for name in started.sink.order if not name.startswith("busy")]
        assert order == ["high", "late", "low", "lowest"]

    async def test_a_prefix_is_reused_and_the_events_are_exact(
        self, started: StartedEngine
    ) -> None:
        short, long = started.prompt(2.5), started.prompt(6.3)
        await started.run("a", short, max_tokens=1)
        await eventually(lambda: started.held_hashes == set(started.sequence(short)))
        await started.run("b", long, max_tokens=1)
        assert started.sink.cached("b") == 2 * started.size
        await eventually(lambda: started.held_hashes == set(started.sequence(long)))

    async def test_tenants_do_not_share(self, started: StartedEngine) -> None:
        tokens, other = started.prompt(2.5), started.salt + 1
        await started.run("a", tokens, max_tokens=1)
        await started.run("b", tokens, max_tokens=1, salt=other)
        assert started.sink.cached("b") == 0
        both = {*started.sequence(tokens), *started.sequence(tokens, other)}
        await eventually(lambda: started.held_hashes == both)
        await started.run("c", tokens, max_tokens=1, salt=other)
        assert started.sink.cached("c") == 2 * started.size

    async def test_tenants_whose_salts_collide_do_not_share(self, started: StartedEngine) -> None:
        tokens = started.prompt(2.5)
        for name, tenant in (("a", "a" * 32), ("b", "b" * 32), ("nobody", "")):
            await started.run(name, tokens, max_tokens=1, tenant=tenant)
        together = started.prompt(2.5, first=9)
        for tenant in ("c", "d"):
            started.submit(tenant, together, max_tokens=1, tenant=tenant * 32)
        await started.ended("c", "d")
        for name in ("a", "b", "nobody", "c", "d"):
            assert started.sink.cached(name) == 0
        await started.run("again", tokens, max_tokens=1, tenant="a" * 32)
        assert started.sink.cached("again") == 2 * started.size

    async def test_the_blocks_of_an_output_serve_the_next_turn(
        self, started: StartedEngine
    ) -> None:
        await started.run("a", started.prompt(2.5), max_tokens=2 * started.size - 2)
        answer = array("I", [*started.sink.tokens("a"), 1, 2, 3]).tobytes()
        await started.run("b", started.prompt(2.5) + answer)
        assert started.sink.cached("b") == 4 * started.size

    async def test_eviction_is_published_and_the_contents_stay_exact(
        self, started: StartedEngine
    ) -> None:
        removed = started.sink.removed
        for i in range(30):
            started.submit(f"r{i}", started.prompt(3.8 + 0.2 * i, first=i % 7))
        await started.ended(*(f"r{i}" for i in range(30)))
        await started.wait_for_events()
        assert started.sink.removed > removed
        assert len(started.sink.held[0]) == started.load().cached_blocks
        before = set(started.sink.held[0])
        started.sink.held[0].add(1)
        started.engine.dump(0)
        assert started.sink.held[0] == before

    async def test_requests_beyond_capacity_are_queued_and_completed(
        self, started: StartedEngine
    ) -> None:
        names = [f"r{i}" for i in range(12)]
        for i, name in enumerate(names):
            started.submit(name, started.prompt(12.5, first=i), max_tokens=100)
        load = started.load()
        assert load.waiting + load.running == 12
        await started.ended(*names)
        assert all(len(started.sink.tokens(name)) == 100 for name in names)

    async def test_a_drain_waits_for_all_requests(self, started: StartedEngine) -> None:
        for i in range(6):
            started.submit(f"r{i}", started.prompt(3.1, first=i), max_tokens=40)
        await asyncio.wait_for(started.engine.drain(), 60)
        assert all(started.sink.finish(f"r{i}") == "length" for i in range(6))
        assert started.load().running == 0

    async def test_an_unknown_rank_is_rejected(self, started: StartedEngine) -> None:
        with pytest.raises(Rejected, match="rank 9"):
            started.submit("a", started.prompt(1), rank=9)

    async def test_log_probabilities_come_with_their_tokens(self, started: StartedEngine) -> None:
        sampling = Sampling(max_tokens=5, temperature=0.0, logprobs=3, ignore_eos=True)
        await started.run("a", started.prompt(2.5), sampling=sampling)
        given = [row for delta in started.sink.deltas["a"] for row in delta.logprobs or []]
        for token, row in zip(started.sink.tokens("a"), given, strict=True):
            assert len(row) >= 3
            assert row[token] == max(row.values()) <= 0
