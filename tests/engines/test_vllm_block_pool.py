"""vLLM's block pool with the retaining queue: order of eviction, and the internals relied on."""

import random
from array import array
from typing import Any

import pytest

from kvmesh.bus.messages import Pin, Retain
from kvmesh.retention.budget import RetentionBudget
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.enginecore.retention_options import RetentionOptions

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
BLOCKS, SIZE, GROUP, NOW = 64, 16, 0, 1.0
USABLE = BLOCKS - 1  # vLLM keeps one as a placeholder


class RetainingPool:
    """A pool of vLLM that retains blocks, and requests that compute all of their prompts."""

    def __init__(self) -> None:
        from kvmesh.worker.engines.vllm.retention.block_runs import RetainedRuns
        from kvmesh.worker.engines.vllm.retention.prefix_cache import PrefixCacheRetention
        from kvmesh.worker.engines.vllm.retention.vllm_prefix_cache import VllmPrefixCache

        self.pool = vllm_pool()
        budget = RetentionBudget(BLOCKS)
        self.runs = RetainedRuns(self.pool.blocks, budget)
        self.cache = VllmPrefixCache(self.pool, self.runs, lambda: NOW)
        self.retention = PrefixCacheRetention(
            RetentionOptions(), self.cache, self.runs, budget, [SIZE], SIZE
        )
        self.held: dict[str, list[Any]] = {}

    def start(
        self, name: str, prompt: int, blocks: int = 8, priority: int = 35, session: str = ""
    ) -> Any:
        """Compute a prompt, and claim its blocks at a priority; its session has its name."""
        from kvmesh.worker.engines.vllm.retention.requests import RetainedRequest

        tokens, hashes = array("I", [prompt] * SIZE * blocks), block_names(prompt, blocks)
        retain = [] if priority == 35 else [Retain(0, None, priority, explicit=True)]
        origin = RequestOrigin(
            request=name,
            salt=1,
            prompt_tokens=len(tokens),
            session=session or name,
            retention=retain,
        )
        request = RetainedRequest(origin, hashes, tokens, [SIZE], SIZE, {})
        self.retention.start_request(request, NOW)
        self.held[name] = self.pool.get_new_blocks(blocks)
        numbers = [block.block_id for block in self.held[name]]
        self.retention.allocated(request, numbers, 1, "")
        for block, block_hash in zip(self.held[name], hashes, strict=True):
            cache_block(self.pool, block, block_hash)
        request.blocks[GROUP] = numbers
        self.retention.claim(request, GROUP, blocks, NOW)
        self.retention.rank_prompt(request, NOW)
        return request

    def end(self, request: Any) -> list[int]:
        """End a request; returns its blocks."""
        self.retention.claim_copies(request, NOW)
        self.retention.rank_prompt(request, NOW)
        held = self.held.pop(request.id)
        self.pool.free_blocks(reversed(held))
        return [block.block_id for block in held]

    def flood(self, blocks: int) -> None:
        """Cache blocks of other prompts."""
        for number in range(blocks):
            (block,) = self.pool.get_new_blocks(1)
            cache_block(self.pool, block, b"flood %026d" % number)
            self.pool.free_blocks([block])

    def hits(self, prompt: int, blocks: int = 8) -> int:
        return sum(bool(self.cache.find(name, GROUP)) for name in block_names(prompt, blocks))

    @property
    def charged(self) -> int:
        return self.retention.state(0, NOW).charged_blocks


def vllm_pool() -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(BLOCKS, True, SIZE)


def block_names(prompt: int, blocks: int) -> list[bytes]:
    return [b"%016d%016d" % (prompt, block) for block in range(blocks)]


def cache_block(pool: Any, block: Any, block_hash: bytes) -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    key = make_block_hash_with_group_id(block_hash, GROUP)
    pool._insert_block_hash(key, block, num_tokens=SIZE)


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
    pools, rng = [vllm_pool(), RetainingPool().pool], random.Random(seed)
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
                    cache_block(pool, block, b"%d-%d" % (step, at))
        assert pools[0].get_num_free_blocks() == pools[1].get_num_free_blocks()


@pytest.mark.parametrize("used", [False, True])
def test_blocks_that_vllm_evicts_by_number_are_reused_first(used: bool) -> None:
    """vLLM does so with blocks whose content could not be loaded from a lower tier."""
    made = RetainingPool()
    request, pool = made.start("a", prompt=1, priority=90), made.pool
    lost = set(request.blocks[GROUP][2:5])
    if not used:
        made.end(request)
    pool.evict_blocks(lost)
    assert made.charged == made.runs.retained == 5
    if used:
        made.end(request)
    assert pool.get_num_free_blocks() == USABLE
    assert {block.block_id for block in pool.get_new_blocks(3)} == lost
    pool.get_new_blocks(USABLE - 8)
    assert made.hits(prompt=1) == 5
    pool.get_new_blocks(5)
    assert made.charged == made.runs.retained == 0


def test_a_reset_ends_all_claims() -> None:
    made = RetainingPool()
    request = made.start("a", prompt=1, priority=90)
    assert not made.pool.reset_prefix_cache()
    assert made.charged == 8
    made.end(request)
    assert made.pool.reset_prefix_cache()
    assert made.charged == made.runs.retained == 0
    assert len(made.pool.get_new_blocks(USABLE)) == USABLE


@pytest.mark.parametrize("second_priority", [35, 60, 90])
@pytest.mark.parametrize("second_ends_first", [False, True])
def test_two_copies_of_a_prompt_are_charged_once(
    second_priority: int, second_ends_first: bool
) -> None:
    made = RetainingPool()
    one = made.start("a", prompt=1, priority=90)
    two = made.start("b", prompt=1, priority=second_priority)
    assert made.charged == 8
    ends = [two, one] if second_ends_first else [one, two]
    blocks = {request.id: made.end(request) for request in ends}
    assert made.charged == 8
    made.flood(USABLE - 16)
    assert {block.block_id for block in made.pool.get_new_blocks(8)} == set(blocks["b"])
    made.flood(2 * USABLE)
    assert (made.hits(prompt=1), made.charged) == (8, 8)


def test_a_claim_reaches_the_first_copy_after_its_request() -> None:
    made = RetainingPool()
    made.end(made.start("a", prompt=1))
    made.end(made.start("b", prompt=1, blocks=10, priority=90))
    assert made.charged == 10
    made.flood(2 * USABLE)
    assert (made.hits(prompt=1, blocks=10), made.charged) == (10, 10)


def test_a_copy_takes_the_claim_when_the_first_one_is_cleared_before_its_request_ends() -> None:
    made = RetainingPool()
    one, two = (made.start(name, prompt=1, priority=90) for name in "ab")
    made.end(one)
    assert made.retention.clear(None, "") == 8
    assert made.charged == 0
    made.end(two)
    assert made.charged == 8
    made.flood(2 * USABLE)
    assert (made.hits(prompt=1), made.charged) == (8, 8)


def test_a_copy_left_alone_is_the_next_to_be_evicted() -> None:
    made = RetainingPool()
    one, two = (made.start(name, prompt=1, priority=90) for name in "ab")
    made.end(one)
    copies = made.end(two)
    made.flood(USABLE - 16)
    made.pool.evict_blocks(set(one.blocks[GROUP]))
    assert (made.hits(prompt=1), made.charged) == (8, 0)
    made.pool.get_new_blocks(8)
    assert {block.block_id for block in made.pool.get_new_blocks(8)} == set(copies)
    assert (made.hits(prompt=1), made.runs.retained) == (0, 0)


def test_a_pin_holds_one_copy_and_lets_go_of_all() -> None:
    made = RetainingPool()
    one = made.start("a", prompt=1)
    pin = Pin(id="p", sequence_hashes=one.sequence_hashes.tobytes(), ttl_s=60.0)
    assert made.retention.pin(pin, NOW) == 8
    made.end(made.start("b", prompt=1))
    made.end(one)
    assert made.charged == 8
    made.flood(2 * USABLE)
    assert (made.hits(prompt=1), made.charged) == (8, 8)
    assert made.retention.unpin("p", NOW) == 8
    assert made.charged == 0
    made.flood(2 * USABLE)
    assert made.hits(prompt=1) == 0


def test_the_end_of_the_session_drops_all_copies() -> None:
    made = RetainingPool()
    for request in [made.start(name, prompt=1, priority=90, session="s") for name in "ab"]:
        made.end(request)
    assert made.retention.release(["s"]) == 16
    assert (made.hits(prompt=1), made.charged, made.runs.retained) == (0, 0, 0)
