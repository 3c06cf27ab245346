"""Retention in a real vLLM whose layers are of several kinds, which share one block pool.

Beside full attention, the models have a sliding window, whose blocks vLLM frees while their request
runs, or linear attention, whose state vLLM keeps at few positions of a prompt.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.random_models import make_hybrid_model, make_sliding_window_model
from support.retention_suite import charged_blocks
from support.vllm import SIZE, VllmRun, sequence
from support.wait import eventually

from kvmesh.bus.messages import Clear, Pin, Retain, Unpin
from kvmesh.worker.capabilities import Retaining

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
LENGTH = 10  # blocks of a prompt
PREFIX = 5 * SIZE
HIT = (LENGTH - 1) * SIZE  # vLLM computes the last block of a cached prompt again


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["sliding window", "linear attention"]
)
async def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmRun]:
    folder = tmp_path_factory.mktemp("models") / "model"
    args = [
        "max_model_len=1024",
        "num_gpu_blocks_override=97",
        "max_num_batched_tokens=128",
    ]
    if request.param == "sliding window":
        make_sliding_window_model(folder, window=2 * SIZE)
    else:
        make_hybrid_model(folder)
        args.append("dtype=bfloat16")  # linear attention on a CPU has no other type
    made = await VllmRun.start(folder, *args)
    assert made.info.block_size == SIZE
    yield made
    await made.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def started(shared: VllmRun) -> VllmRun:
    await asyncio.wait_for(shared.engine.drain(), 60)
    assert (await shared.execute(Clear())).ok
    await eventually(lambda: charged_blocks(shared) == 0)
    shared.sink.deltas.clear()
    return shared


async def flood(started: VllmRun, count: int = 12) -> None:
    for i in range(count):
        await started.run(f"flood {i}", started.prompt(LENGTH, 500 + i), max_tokens=1)


async def test_a_prompt_survives_others_only_with_a_claim(started: VllmRun) -> None:
    for name, retain in (("plain", []), ("kept", [Retain(0, None, 80, explicit=True)])):
        tokens = started.prompt(LENGTH, len(name))
        await started.run(name, tokens, max_tokens=1, retention=retain)
        await flood(started)
        await started.run(f"{name} again", tokens, max_tokens=1)
        assert started.sink.cached(f"{name} again") == (HIT if retain else 0)
        assert (await started.execute(Clear())).ok


async def test_a_prompt_survives_its_own_long_answer(started: VllmRun) -> None:
    """The window leaves the prompt behind: vLLM frees its blocks before the request has ended."""
    tokens = started.prompt(LENGTH, 1)
    kept = [Retain(0, None, 90, explicit=True)]
    await started.run("kept", tokens, max_tokens=200, retention=kept)
    await flood(started)
    await started.run("again", tokens, max_tokens=1)
    assert started.sink.cached("again") == HIT


async def test_prompts_share_a_retained_prefix_at_once(started: VllmRun) -> None:
    """The second prompt continues from the end of the prefix, the first to differ from another."""
    whole = Retain(0, None, 80, explicit=True)
    for i, (retain, reused) in enumerate(
        ((whole, 0), (Retain(0, PREFIX + 7, 80, explicit=True), PREFIX))
    ):
        prefix = started.prompt(LENGTH, i)[: 4 * (PREFIX + 7)]
        one, other = prefix + started.prompt(2, 900), prefix + started.prompt(2, 901)
        await started.run(f"one {i}", one, max_tokens=1, retention=[retain])
        await flood(started)
        await started.run(f"other {i}", other, max_tokens=1)
        assert started.sink.cached(f"other {i}") == reused
        assert (await started.execute(Clear())).ok


async def test_prompts_share_a_pinned_prefix_at_once(started: VllmRun) -> None:
    prefix = started.prompt(LENGTH, 11)[: 4 * PREFIX]
    hashes = array("Q", sequence(prefix)).tobytes()
    assert (await started.execute(Pin(id="p", sequence_hashes=hashes, ttl_s=600.0))).ok
    await started.run("one", prefix + started.prompt(2, 900), max_tokens=1)
    await flood(started)
    await started.run("other", prefix + started.prompt(2, 901), max_tokens=1)
    assert started.sink.cached("other") == PREFIX
    assert (await started.execute(Unpin("p"))).ok


async def test_claims_beyond_the_budget_are_clipped_and_refuse_nothing(started: VllmRun) -> None:
    names = [f"{i}" for i in range(8)]
    for i, name in enumerate(names):
        kept = [Retain(0, None, 60, explicit=True)]
        await started.run(name, started.prompt(LENGTH, i), max_tokens=1, retention=kept)
    told = [outcome(started, name) for name in names]
    assert told == sorted(told, reverse=True)
    assert set(told) == {"honoured", "clipped"}
    assert charged_blocks(started) == 48  # half of the pool
    await started.run("long", started.prompt(30, 700), max_tokens=1)
    for i, name in enumerate(names):
        await started.run(f"{name} again", started.prompt(LENGTH, i), max_tokens=1)
        if told[i] == "honoured":
            assert started.sink.cached(f"{name} again") == HIT


async def test_released_and_cleared_blocks_are_gone(started: VllmRun) -> None:
    tokens = started.prompt(LENGTH, 3)
    kept = [Retain(0, None, 90, explicit=True)]
    await started.run("kept", tokens, max_tokens=1, retention=kept, session="w")
    assert charged_blocks(started) > 0
    assert isinstance(started.engine, Retaining)
    assert await started.engine.release(["w"]) > 0
    assert charged_blocks(started) == 0
    await started.run("again", tokens, max_tokens=1)
    assert started.sink.cached("again") == 0


def outcome(started: VllmRun, request: str) -> str:
    (told,) = [delta.retention for delta in started.sink.deltas[request] if delta.retention]
    return told[0]
