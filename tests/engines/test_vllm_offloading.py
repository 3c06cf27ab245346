"""vLLM's own offloading in the worker, by vLLM's setting alone, beside kvmesh's connectors."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.engines import prompt
from support.nats import NatsServer
from support.vllm import SIZE, VllmRun, sequence, work
from support.vllm_kvbm import kvbm_run
from support.vllm_offload import host_copies
from support.wait import eventually

from kvmesh.bus.messages import Retain
from kvmesh.hashing import salt
from kvmesh.worker.capabilities import RoleSwitching, Tiered
from kvmesh.worker.engine import Unsupported

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
HOST = 1
HASHES_ALONE = (
    'kv_transfer_config={"kv_connector": "OffloadingConnector", "kv_role": "kv_both",'
    ' "kv_connector_extra_config": {"self_describing_kv_events": false}}'
)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with host_copies(tmp_path_factory.mktemp("plugins")):
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False])
async def run(
    request: pytest.FixtureRequest, copies: None, tiny_model: Path
) -> AsyncIterator[VllmRun]:
    """A vLLM of 16 blocks with a host tier that holds many more, and retention, the default.

    Once its events describe the blocks of the host tier, and once they have hashes alone.
    """
    arguments = ["kv_offloading_size=0.05", "num_gpu_blocks_override=17"]
    if not request.param:
        arguments.append(HASHES_ALONE)
    made = await VllmRun.start(tiny_model, *arguments)
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
    assert isinstance(run.engine, Tiered)
    counts = run.engine.tier_counts()
    assert counts is not None
    assert counts.loaded[HOST] == 5


async def test_a_tenant_s_host_blocks_are_the_tenant_s(run: VllmRun) -> None:
    tokens, seed = prompt(4 * SIZE + 1, 1500), salt("tiny", "", "tenant", b"key")
    tenant = {"salt": seed, "tenant": "tenant"}
    await run.run_works(work("of a tenant", tokens, 1, **tenant))
    await flood(run, 3000)
    hashes = set(sequence(tokens, seed)[:4])
    await eventually(lambda: hashes <= run.sink.sequences_below(HOST), what="the host's blocks")
    assert not set(sequence(tokens)) & run.sink.sequences_below(HOST)
    await run.run_works(work("again by the tenant", tokens, 1, **tenant))
    await run.run_works(work("by another", tokens, 1))
    assert run.sink.cached("again by the tenant") == 4 * SIZE
    assert run.sink.cached("by another") == 0


async def test_claims_hold_beside_the_host_tier(run: VllmRun) -> None:
    tokens = prompt(4 * SIZE + 1, 2500)
    kept = [Retain(0, None, 90, explicit=True)]
    await run.run_works(work("kept", tokens, 1, retention=kept))
    await flood(run, 3500)
    await run.run_works(work("again kept", tokens, 1))
    assert run.sink.tiers("again kept")[0] == 4 * SIZE


async def test_the_worker_offers_no_handoff(run: VllmRun) -> None:
    assert not run.info.supports_handoff
    assert isinstance(run.engine, RoleSwitching)
    with pytest.raises(Unsupported, match="hands KV off"):
        await run.engine.switch_role("prefill")


async def test_the_block_manager_works_beside_the_host_tier(
    copies: None, nats_server: NatsServer, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ["kv_offloading_size=0.05", "num_gpu_blocks_override=17"]
    async with kvbm_run(nats_server, tmp_path, tiny_model, *arguments) as run:
        assert isinstance(run.engine, Tiered)
        tokens = prompt(5 * SIZE + 1, 1000)
        first = await run.generate("first", tokens)
        for number in range(4):
            await run.generate(f"flood {number}", prompt(200, number))
        assert await run.generate("again", tokens) == first
        assert run.sink.tiers("again")[HOST] == 5 * SIZE  # once, of two that have them
        counts = run.engine.tier_counts()
        assert counts is not None
        assert (counts.loaded[HOST], counts.corrupt) == (5, 0)
        assert counts.written >= 5
