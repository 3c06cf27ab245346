"""KV handoff between two torch engines: real blocks, real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import pytest_asyncio
from msgspec.structs import replace
from support.nats import free_port
from support.recorder import Recorder
from support.tiny import tiny_model
from support.torch_core import BLOCK, make_work
from support.wait import eventually

from kvmesh.bus.messages import Clear, Work
from kvmesh.settings import Settings
from kvmesh.settings.schema import TorchSettings, TransferSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError
from kvmesh.worker.engines.torch.engine import TorchEngine

TOKENS = list(range(100))
BLOCK_BYTES = 16384  # of the tiny model


@dataclass
class StartedTorch:
    engine: TorchEngine
    sink: Recorder

    async def run(self, work: Work) -> list[int]:
        self.engine.submit(work)
        await eventually(lambda: self.sink.finish(work.request), timeout=60)
        return self.sink.tokens(work.request)

    async def prompt(self, name: str, tokens: list[int]) -> Work:
        """Compute a prompt for another engine; returns that engine's work."""
        await self.run(replace(make_work(name, tokens, 1), prefill=True))
        handoff = self.sink.deltas[name][-1].handoff
        return replace(make_work(f"{name} goes on", tokens), handoff=handoff)

    @property
    def idle_blocks(self) -> bool:
        return self.engine.load("")[0].active_blocks == 0


Start = Callable[..., Awaitable[StartedTorch]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    running: list[StartedTorch] = []

    async def start(serves: str, folder: Path | None = None, **options: object) -> StartedTorch:
        worker = replace(WorkerSettings(engine="torch", block_size=BLOCK), serves=serves)
        settings = Settings(
            torch=TorchSettings(blocks=64, threads=1),
            worker=worker,
            transfer=replace(TransferSettings(via="tcp"), **options),
        )
        engine, sink = TorchEngine(EngineContext(settings, folder or tiny_model())), Recorder()
        running.append(StartedTorch(engine, sink))
        await engine.start(sink)
        return running[-1]

    yield start
    for each in running:
        await each.engine.close()


def count(started: StartedTorch, side: str, result: str) -> int:
    """Handoffs of an engine that ended so."""
    counts = started.engine.handoff_counts()
    return 0 if counts is None else counts.ended.get((side, result), 0)


async def test_output_after_a_handoff_equals_that_of_one_engine(start: Start) -> None:
    whole, first, second = await start("aggregated"), await start("prefill"), await start("decode")
    expected = await whole.run(make_work("whole", TOKENS))
    work = await first.prompt("a", TOKENS)
    assert await second.run(work) == expected
    assert second.sink.cached(work.request) == 96
    assert count(second, "fetched", "tcp") == 1
    assert count(first, "offered", "done") == 1
    assert count(whole, "offered", "done") == 0
    assert second.sink.held[0] >= first.sink.held[0]
    await eventually(lambda: first.idle_blocks and second.idle_blocks)
    await asyncio.gather(first.engine.drain(), second.engine.drain())


async def test_engines_that_change_their_roles_hand_off(start: Start) -> None:
    first, second = await start("aggregated"), await start("aggregated")
    expected = await second.run(make_work("whole", TOKENS))
    assert (await first.prompt("before", TOKENS)).handoff is None, "its role needs no handoff"
    await second.engine.clear(Clear())
    await first.engine.clear(Clear())
    await first.engine.switch_role("prefill")
    await second.engine.switch_role("decode")
    work = await first.prompt("a", TOKENS)
    assert await second.run(work) == expected
    assert second.sink.cached(work.request) == 96
    for each, role in ((first, "decode"), (second, "prefill")):
        await each.engine.clear(Clear())
        await each.engine.switch_role(role)
    back = await second.prompt("b", TOKENS)
    assert await first.run(back) == expected
    assert first.sink.cached(back.request) == 96
    await first.engine.switch_role("aggregated")
    late = await second.prompt("c", TOKENS)
    assert await first.run(late) == expected, "placed by the earlier role"


async def test_only_missing_blocks_are_fetched(start: Start) -> None:
    first, second = await start("prefill"), await start("decode")
    await second.run(make_work("earlier", TOKENS[:50], 1))
    work = await first.prompt("a", TOKENS)
    await second.run(work)
    assert second.sink.cached(work.request) == 96
    counts = second.engine.handoff_counts()
    assert counts is not None
    assert counts.fetched_bytes == 3 * BLOCK_BYTES


async def test_concurrent_handoffs_share_a_small_staging_memory(start: Start) -> None:
    first = await start("prefill", staging_bytes=8 * BLOCK_BYTES)
    second = await start("decode", staging_bytes=8 * BLOCK_BYTES)
    prompts = {f"p{i}": list(range(i, i + 100)) for i in range(4)}
    whole = await start("aggregated")
    expected = [await whole.run(make_work(name, p)) for name, p in prompts.items()]

    async def both(name: str) -> list[int]:
        return await second.run(await first.prompt(name, prompts[name]))

    assert await asyncio.gather(*map(both, prompts)) == expected


async def test_a_prompt_is_computed_if_its_blocks_cannot_be_fetched(start: Start) -> None:
    whole, first, second = await start("aggregated"), await start("prefill"), await start("decode")
    expected = await whole.run(make_work("whole", TOKENS))
    gone = await first.prompt("gone", TOKENS)
    odd = replace(make_work("odd", TOKENS), handoff={"nonsense": 1})
    first.engine.abort("gone")
    assert await second.run(gone) == expected
    assert second.sink.cached(gone.request) == 0
    await second.engine.clear(Clear())
    assert await second.run(odd) == expected
    await second.engine.clear(Clear())
    dead = await first.prompt("dead", TOKENS)
    await first.engine.close()
    assert await second.run(dead) == expected
    assert not second.sink.errors


async def test_blocks_of_another_model_are_computed_again(start: Start) -> None:
    first, second = await start("prefill"), await start("decode", tiny_model(seed=1))
    whole = await start("aggregated", tiny_model(seed=1))
    expected = await whole.run(make_work("whole", TOKENS))
    assert await second.run(await first.prompt("a", TOKENS)) == expected


async def test_no_kv_is_offered_without_staging_memory(start: Start) -> None:
    first = await start("prefill", staging_bytes=1)
    assert (await first.prompt("a", TOKENS)).handoff is None
    assert count(first, "offered", "failed") == 1
    await eventually(lambda: first.idle_blocks)


async def test_unfetched_kv_is_released(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    first, second = await start("prefill", lend_s=0.05), await start("decode")
    work = await first.prompt("a", TOKENS)
    await eventually(lambda: "expired unfetched" in caplog.text)
    assert len(await second.run(work)) == 12
    assert second.sink.cached(work.request) == 0


async def test_a_request_can_be_aborted_during_its_handoff(start: Start) -> None:
    first, second = await start("prefill"), await start("decode")
    work = await first.prompt("a", TOKENS)
    second.engine.submit(work)
    assert second.engine.load("")[0].waiting == 1
    assert second.engine.abort(work.request)
    assert second.sink.finish(work.request) == "abort"
    await second.engine.drain()
    assert second.sink.tokens(work.request) == []
    await eventually(lambda: second.idle_blocks)
    assert not second.engine.abort(work.request)


async def test_an_engine_without_its_port_fails_to_start(start: Start) -> None:
    port = free_port()
    await start("prefill", port=port)
    with pytest.raises(EngineError, match="cannot listen"):
        await start("decode", port=port)
