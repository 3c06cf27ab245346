"""vLLM's block pool with the retaining queue: order of eviction, and the internals relied on."""

import random
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
BLOCKS, GROUP = 64, 0


def make_pool(retaining: bool) -> Any:
    """A pool of vLLM, with its own queue or the retaining one."""
    from vllm.v1.core.block_pool import BlockPool

    from kvmesh.retention.budget import RetentionBudget
    from kvmesh.worker.engines.vllm.retention.block_queue import RetainingBlockQueue
    from kvmesh.worker.engines.vllm.retention.block_runs import RetainedRuns

    pool = BlockPool(BLOCKS, True, 16)
    if retaining:
        runs = RetainedRuns(pool.blocks, RetentionBudget(BLOCKS))
        queue = RetainingBlockQueue(pool.free_block_queue, type(pool.blocks[0]), runs, lambda: 1.0)
        pool.free_block_queue = queue
    return pool


def test_the_installed_vllm_has_the_internals_that_were_tested() -> None:
    from kvmesh.worker.engines.vllm.retention.internals import changed_internals

    assert changed_internals() == []


def test_a_changed_internal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    from kvmesh.worker.engines.vllm.retention.internals import changed_internals

    def prepend_all(self: Any, blocks: Any) -> None: ...

    monkeypatch.setattr(FreeKVCacheBlockQueue, "prepend_all", prepend_all, raising=False)
    monkeypatch.delattr(FreeKVCacheBlockQueue, "append_n")
    assert changed_internals() == [
        "FreeKVCacheBlockQueue.append_n",
        "FreeKVCacheBlockQueue.prepend_all",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_without_claims_vllm_evicts_the_same_blocks(seed: int) -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    pools, rng = [make_pool(False), make_pool(True)], random.Random(seed)
    held: list[list[int]] = []
    for step in range(200):
        free = pools[0].get_num_free_blocks()
        count = rng.randrange(1, 9)
        if held and (free < count or rng.random() < 0.5):
            numbers = held.pop(rng.randrange(len(held)))
            for pool in pools:
                pool.free_blocks([pool.blocks[number] for number in reversed(numbers)])
        elif held and rng.random() < 0.3:
            numbers = rng.choice(held)
            held.append(numbers)
            for pool in pools:
                pool.touch([pool.blocks[number] for number in numbers])
        else:
            taken = [pool.get_new_blocks(count) for pool in pools]
            numbers = [block.block_id for block in taken[0]]
            assert [block.block_id for block in taken[1]] == numbers
            held.append(numbers)
            for pool, blocks in zip(pools, taken, strict=True):
                for at, block in enumerate(blocks[: count - step % 3]):
                    key = make_block_hash_with_group_id(b"%d-%d" % (step, at), GROUP)
                    pool._insert_block_hash(key, block, num_tokens=16)
        assert pools[0].get_num_free_blocks() == pools[1].get_num_free_blocks()
