"""vLLM's own offloading in the worker, by vLLM's setting alone, beside kvmesh's connectors."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.engines import prompt
from support.vllm import SIZE, VllmRun, sequence, work
from support.vllm_offload import host_copies
from support.wait import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
HOST = 1


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with host_copies(tmp_path_factory.mktemp("plugins")):
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(copies: None, tiny_model: Path) -> AsyncIterator[VllmRun]:
    """A vLLM of 16 blocks with a host tier that holds many more, and retention, the default."""
    made = await VllmRun.start(tiny_model, "kv_offloading_size=0.05", "num_gpu_blocks_override=17")
    yield made
    await made.engine.close()


async def flood(run: VllmRun, seed: int) -> None:
    for number in range(4):
        await run.run_works(work(f"flood {seed} {number}", prompt(200, seed + number), 1))


async def test_the_host_tier_serves_evicted_blocks_and_the_index_knows_them(run: VllmRun) -> None:
    tokens = prompt(5 * SIZE + 1, 1000)
    await run.run_works(work("first", tokens, 1))
    await flood(run, 2000)
    hashes = set(sequence(tokens)[:5])
    await eventually(lambda: hashes <= run.sink.sequences_below(HOST), what="the host's blocks")
    await eventually(lambda: not hashes & run.held_hashes, what="the device has evicted them")
    await run.run_works(work("again", tokens, 1))
    assert run.sink.tiers("again")[:2] == [0, 5 * SIZE]
    assert run.sink.tokens("again") == run.sink.tokens("first")
    assert run.engine.tier_counts().loaded[HOST] == 5
