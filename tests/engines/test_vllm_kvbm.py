"""Real vLLM with a real kvbm: write-through, onboarding, equal output."""

from array import array
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from support.engines import make_prefetch
from support.nats import NatsServer
from support.vllm import PLAIN, SIZE, prompt, sequence
from support.vllm_kvbm import KvbmRun, kvbm_run
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Fetch, KvbmRequest, MessageDecoder, Sampling
from kvmesh.settings.schema import VllmSettings
from kvmesh.worker.capabilities import Tiered, execute_command

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
DECODER: MessageDecoder[KvbmRequest] = MessageDecoder(KvbmRequest)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(
    nats_server: NatsServer, slow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[KvbmRun]:
    folder = tmp_path_factory.mktemp("node")
    async with kvbm_run(nats_server, folder, slow_model) as run:
        yield run


async def onboarded(run: KvbmRun, tokens: bytes, depth: int) -> None:
    """Repeat a prompt, as "loaded", until `depth` tokens were loaded; its output is the same."""
    first = await run.generate("first", tokens)
    await run.onboarded(tokens, depth)
    loaded = run.sink.tokens("loaded")
    assert loaded == first[: len(loaded)]


async def test_evicted_blocks_are_onboarded(run: KvbmRun) -> None:
    await onboarded(run, prompt(150), 128)


async def test_onboarded_blocks_are_reported_by_tier(run: KvbmRun) -> None:
    assert isinstance(run.engine, Tiered)
    tokens = prompt(150, first=3)
    await onboarded(run, tokens, 128)
    await run.generate("held", tokens)
    assert (run.sink.tiers("loaded"), run.sink.tiers("held")) == ([0, 128], [128])
    counts = run.engine.tier_counts()
    assert counts is not None
    assert counts.loaded[1] >= 4
    assert counts.written >= 4
    assert (counts.loaded[2:], counts.skipped, counts.corrupt) == ([0, 0], 0, 0)


async def test_blocks_of_an_ephemeral_request_are_not_written(run: KvbmRun) -> None:
    tokens = prompt(150, first=1500)
    await run.generate("ephemeral", tokens, ephemeral=True)
    await onboarded(run, prompt(150, first=1700), 128)  # written after the other would have been
    await run.clear_cache()
    await run.generate("again", tokens)
    assert run.sink.cached("again") == 0


async def test_an_answer_is_onboarded_with_its_prompt(run: KvbmRun) -> None:
    sampling = Sampling(max_tokens=100, temperature=0.0, ignore_eos=True)
    for attempt in range(5):  # what is not written in time is computed, and written then
        tokens = prompt(150, first=2100 + attempt)
        answer = await run.generate("long", tokens, sampling=sampling)
        await run.clear_cache()
        await run.generate("again", tokens + array("I", answer).tobytes())
        if run.sink.cached("again") == 224:
            return
    raise AssertionError(f"{run.sink.cached('again')} tokens of prompt and answer were loaded")


async def test_a_prefetch_loads_what_the_kvbm_holds(run: KvbmRun) -> None:
    tokens = prompt(300, first=11)
    await onboarded(run, tokens, 288)
    for _ in range(30):
        await run.clear_cache()
        wanted = run.loaded_blocks() + 9
        assert not await prefetch(run, tokens)
        with suppress(AssertionError):
            await eventually(partial(has_loaded, run, wanted), timeout=3)
            break
    await run.generate("real", tokens)
    assert run.sink.tiers("real") == [288]


async def test_a_prefetch_computes_little_that_the_kvbm_lacks(run: KvbmRun) -> None:
    tokens = prompt(300, first=1234)
    assert not await prefetch(run, tokens)
    await eventually(lambda: sequence(tokens)[0] in run.sink.sequences, what="the first block")
    await run.generate("other", tokens)
    assert run.sink.cached("other") == SIZE


def has_loaded(run: KvbmRun, blocks: int) -> bool:
    return run.loaded_blocks() >= blocks


async def prefetch(run: KvbmRun, tokens: bytes) -> str:
    """Start a prefetch that computes nothing; returns the reason if it is refused."""
    command = make_prefetch(tokens, salt=PLAIN)
    return (await execute_command(run.engine, "e", command)).reason


async def test_the_kvbm_receives_the_speeds_of_vllm(run: KvbmRun) -> None:
    bus = await Bus.connect(run.mesh.options, "listener")
    fetches: list[Fetch] = []

    def record(request: KvbmRequest) -> None:
        if isinstance(request, Fetch):
            fetches.append(request)

    await bus.subscribe(bus.subjects.expand("kvbm.>"), DECODER, record)
    tokens = prompt(150, first=5)
    await onboarded(run, tokens, 128)
    await run.generate("last", prompt(150, first=6))
    await eventually(lambda: fetches and fetches[-1].load_bps > 0, what="vLLM reports both speeds")
    assert fetches[-1].compute_tps > 0
    await bus.close()


async def test_the_last_block_of_a_prompt_of_full_blocks_is_computed(run: KvbmRun) -> None:
    await onboarded(run, prompt(128, first=7), 96)


async def test_the_engine_runs_without_a_kvbm_and_attaches_to_the_next(run: KvbmRun) -> None:
    tokens = prompt(150, first=11)
    expected = await run.generate("before", tokens)
    run.mesh.kill("kvbm-0")
    await run.clear_cache()
    assert await run.generate("without", tokens) == expected
    run.mesh.restart("kvbm-0")
    await run.clear_cache()
    await onboarded(run, tokens, 128)


async def test_a_vllm_that_stops_leaves_its_last_blocks_to_the_others(
    run: KvbmRun, slow_model: Path
) -> None:
    other = KvbmRun(run.mesh, slow_model, VllmSettings())
    await other.engine.start(other.sink)
    prompts = [prompt(150, first=3000 + 7 * number) for number in range(4)]
    expected = [await other.generate(f"r{n}", tokens) for n, tokens in enumerate(prompts)]
    await other.engine.close()
    await run.clear_cache()
    for number, tokens in enumerate(prompts):
        assert await run.generate(f"r{number}", tokens) == expected[number]
        assert run.sink.tiers(f"r{number}") == [0, 128]
