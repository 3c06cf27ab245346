"""The torch engine above a small block manager: the same output from every source of KV."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

from support.small_kvbm import SmallKvbm
from support.torch_tiers import SALT, Answer, Host, make_work
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Await, Clear, Computed, Corrupt, Fetch, Offer, Prefetch
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.worker.engines.engine_tiers import TierLimits

Start = Callable[..., Awaitable[Host]]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(8000) for _ in range(length)]


@pytest_asyncio.fixture
async def kvbm(bus: Bus, limits: StreamLimits, tmp_path: Path) -> AsyncIterator[SmallKvbm]:
    kvbm = SmallKvbm(bus, limits, tmp_path)
    await kvbm.start()
    yield kvbm
    await kvbm.stop()


@pytest_asyncio.fixture
async def start(bus: Bus, limits: StreamLimits) -> AsyncIterator[Start]:
    hosts: list[Host] = []

    async def begin(name: str, blocks: int = 256, attach: bool = True) -> Host:
        host = Host(bus, limits, name, blocks)
        hosts.append(host)
        await host.start(attach)
        return host

    yield begin
    for host in hosts:
        await host.engine.close()


async def output_without_kvbm(start: Start, tokens: list[int], max_tokens: int = 8) -> Answer:
    """The output of an engine without the block manager's contents."""
    host = await start("cold", attach=False)
    work = make_work("cold", tokens, max_tokens, salt=99, tenant="nobody")
    await host.run(work)
    assert host.cached("cold") == [0]
    return host.answer("cold")


async def test_evicted_blocks_are_onboarded_from_lower_tiers(kvbm: SmallKvbm, start: Start) -> None:
    tokens = prompt(100)
    host = await start("w-1")
    await host.run(make_work("first", tokens))
    await host.written()
    await eventually(lambda: len(kvbm.blocks) == 6)
    await host.engine.clear(Clear())
    await host.run(make_work("again", tokens))
    own, loaded = host.cached("again")
    assert own == 0
    assert 0 < loaded <= 96, "the engine computes what it does not load in time"
    assert host.answer("again") == host.answer("first") == await output_without_kvbm(start, tokens)
    assert host.lower_tiers.counts.loaded == [0, loaded // 16, 0, 0]
    assert kvbm.count(Await) == 1
    await eventually(lambda: kvbm.count(Computed) >= 2)
    await host.check_accounting()


async def test_another_worker_loads_the_blocks(kvbm: SmallKvbm, start: Start) -> None:
    tokens = prompt(130)
    one, two = await start("w-1"), await start("w-2")
    await one.run(make_work("one", tokens))
    await eventually(lambda: len(kvbm.blocks) == 8)
    await two.run(make_work("half", tokens[:40]), make_work("two", tokens))
    assert two.cached("half") == [0, 32]
    assert sum(two.cached("two")) == 128
    assert two.answer("two") == one.answer("one")
    await two.check_accounting()


async def test_other_tenants_and_other_tokens_find_no_blocks(kvbm: SmallKvbm, start: Start) -> None:
    tokens = prompt(64)
    one, two = await start("w-1"), await start("w-2")
    await one.run(make_work("one", tokens, tenant="a"))
    await eventually(lambda: len(kvbm.blocks) == 4)
    await two.run(make_work("two", tokens, tenant="b"))
    assert two.cached("two") == [0]
    assert two.answer("two") == one.answer("one")


async def test_damaged_blocks_are_computed_again(kvbm: SmallKvbm, start: Start) -> None:
    tokens = prompt(100)
    one, two = await start("w-1"), await start("w-2")
    await one.run(make_work("one", tokens))
    await eventually(lambda: len(kvbm.blocks) == 6)
    offset, _ = list(kvbm.blocks.values())[2]
    with kvbm.arena.open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"damage")
    await two.run(make_work("two", tokens))
    own, loaded = two.cached("two")
    assert own == 0
    assert 0 < loaded < 96, "the engine computes what it does not load in time"
    assert two.answer("two") == one.answer("one")
    assert two.lower_tiers.counts.corrupt == 1
    await eventually(lambda: kvbm.count(Corrupt) == 1 and len(kvbm.blocks) == 6)
    await two.check_accounting()


async def test_blocks_beyond_the_arena_are_computed_again(
    kvbm: SmallKvbm, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(100)
    one, two = await start("w-1"), await start("w-2")
    await one.run(make_work("one", tokens))
    await eventually(lambda: len(kvbm.blocks) == 6)
    for digest, (_, checksum) in list(kvbm.blocks.items()):
        kvbm.blocks[digest] = (kvbm.arena.stat().st_size, checksum)
    await two.run(make_work("two", tokens))
    assert two.cached("two") == [0]
    assert two.answer("two") == one.answer("one")
    assert caplog.text.count("request two: cannot copy blocks") == 1
    await two.check_accounting()


async def test_many_concurrent_requests_with_little_memory(kvbm: SmallKvbm, start: Start) -> None:
    shared = prompt(60)
    prompts = {f"r{i}": [*shared[: 20 * (i % 4)], *prompt(30 + 7 * i, i)] for i in range(6)}
    alone = await start("alone", attach=False)
    expected: dict[str, Answer] = {}
    for name, tokens in prompts.items():
        await alone.run(make_work(name, tokens, 8, salt=99, tenant="nobody"))
        expected[name] = alone.answer(name)
    one, two = await start("w-1", blocks=14), await start("w-2", blocks=20)
    for host in (one, two, one):
        host.sink.deltas.clear()
        await host.run(*(make_work(name, tokens, 8) for name, tokens in prompts.items()))
        assert {name: host.answer(name) for name in prompts} == expected
        await host.written()
        await host.check_accounting()
    assert one.lower_tiers.counts.loaded[1] > 0
    assert two.lower_tiers.counts.loaded[1] > 0
    await eventually(lambda: not kvbm.tickets, what="tickets are back")


async def test_a_silent_kvbm_delays_but_loses_nothing(
    kvbm: SmallKvbm, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.blocks.kvbm_client.REQUEST_S", 0.2)
    host = await start("w-1")
    host.lower_tiers._limits = TierLimits(wait_s=0.0, deadline_s=5.0, queue=100)
    kvbm.silent = {Fetch, Offer}
    tokens = prompt(50)
    await host.run(make_work("a", tokens), make_work("b", prompt(40, 3)))
    kvbm.silent = set()
    assert host.answer("a") == await output_without_kvbm(start, tokens)
    await host.attached(2)
    await host.engine.clear(Clear())
    await host.run(make_work("c", tokens))
    assert host.answer("c") == host.answer("a")


async def test_an_abort_during_a_wait_leaves_nothing_behind(
    kvbm: SmallKvbm, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.blocks.kvbm_client.REQUEST_S", 0.2)
    host = await start("w-1")
    kvbm.silent = {Fetch}
    host.engine.submit(make_work("a", prompt(50)))
    await eventually(lambda: kvbm.count(Fetch) == 1)
    assert host.engine.abort("a")
    assert host.ended("a") == "abort"
    await asyncio.wait_for(host.engine.drain(), PATIENCE_S)
    kvbm.silent = set()
    await host.check_accounting()


def make_prefetch(tokens: list[int], **fields: object) -> Prefetch:
    base = Prefetch(id="p", tokens=array("I", tokens).tobytes(), salt=SALT)
    return msgspec.structs.replace(base, **fields)


async def test_a_prefetch_loads_before_the_request(kvbm: SmallKvbm, start: Start) -> None:
    tokens = prompt(100)
    one, two = await start("w-1"), await start("w-2")
    await one.run(make_work("one", tokens))
    await eventually(lambda: len(kvbm.blocks) == 6)
    assert not two.engine.prefetch(make_prefetch(tokens))
    await eventually(lambda: two.lower_tiers.counts.loaded[1] == 6)
    await eventually(lambda: not two.engine.abort("p"), what="it has ended")
    await two.run(make_work("two", tokens))
    assert two.cached("two") == [96]
    assert two.answer("two") == one.answer("one")
    await two.check_accounting()


async def test_a_prefetch_computes_up_to_its_limit(kvbm: SmallKvbm, start: Start) -> None:
    tokens = prompt(100)
    one, two = await start("w-1"), await start("w-2")
    await one.run(make_work("one", tokens[:50]))
    await eventually(lambda: len(kvbm.blocks) == 3)
    assert not two.engine.prefetch(make_prefetch(tokens, compute=30))
    await eventually(lambda: len(kvbm.blocks) == 4, what="a block is computed and written")
    await eventually(lambda: not two.engine.abort("p"), what="it has ended")
    await two.run(make_work("two", tokens))
    assert two.cached("two") == [64]
    assert list(two.sink.deltas) == ["two"]
    assert two.answer("two") == await output_without_kvbm(start, tokens)


async def test_a_scheduled_prefetch_ends_by_command_and_by_request(
    kvbm: SmallKvbm, start: Start
) -> None:
    tokens = prompt(100)
    host = await start("w-1")
    later = time.time() + 60
    assert not host.engine.prefetch(make_prefetch(tokens, at=later))
    assert host.engine.abort("p")
    assert not host.engine.abort("p")
    assert not host.engine.prefetch(make_prefetch(tokens, at=later))
    assert not host.engine.prefetch(make_prefetch(prompt(50, 1), id="other", at=later))
    await host.run(make_work("request", [*tokens, 1, 2, 3]))
    assert not host.engine.abort("p")
    assert host.engine.abort("other")
    assert host.engine.prefetch(make_prefetch(tokens[:15])) == "the prompt has no full block"
    assert kvbm.count(Fetch) == 1
