"""The free queue of vLLM's blocks with retention, on blocks with vLLM's fields."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import RetentionWish
from kvmesh.worker.engines.vllm.retention.block_queue import RetainingBlockQueue
from kvmesh.worker.engines.vllm.retention.block_runs import RetainedRuns

BLOCKS = 24
HIGH, LOW, DEFAULT = RetentionWish(80), RetentionWish(10), RetentionWish()


@dataclass(eq=False)
class Block:
    """A block of vLLM, as far as its free queue uses it."""

    block_id: int
    prev_free_block: Any = None
    next_free_block: Any = None
    block_hash: bytes | None = b"cached"


class InitialQueue:
    """vLLM's free queue at the start: all blocks in the order of their ids."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self.num_free_blocks = len(blocks)

    def popleft_n(self, n: int) -> list[Block]:
        self.num_free_blocks -= n
        return self._blocks[:n]


class Pool:
    """A queue of `BLOCKS` blocks, the budget that claims are charged to, and a clock."""

    def __init__(self, max_size: int = BLOCKS) -> None:
        self.now = 1.0
        self.blocks = [Block(number) for number in range(BLOCKS)]
        self.budget = RetentionBudget(max_size)
        self.runs = RetainedRuns(self.blocks, self.budget)
        initial = InitialQueue(self.blocks)
        self.queue = RetainingBlockQueue(initial, Block, self.runs, lambda: self.now)

    def take(self, count: int) -> list[int]:
        return [block.block_id for block in self.queue.popleft_n(count)]

    def free(self, *numbers: int) -> None:
        self.queue.append_n([self.blocks[number] for number in numbers])

    def use(self, *numbers: int) -> None:
        for number in numbers:
            self.queue.remove(self.blocks[number])

    def claim(self, wish: RetentionWish, *numbers: int) -> None:
        for start, stop, run in list(self.runs.segments(numbers)):
            part = numbers[start:stop]
            made = self.runs.isolate(part, run, "tenant")
            self.budget.claim(made.retention, len(part), wish, self.now)
            self.runs.update(made, part, self.now)

    def doubt(self, doubtful: bool, *numbers: int) -> None:
        for start, stop, run in list(self.runs.segments(numbers)):
            part = numbers[start:stop]
            self.runs.doubt(self.runs.isolate(part, run, ""), part, doubtful, self.now)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_without_claims_the_order_is_that_of_vllm(pool: Pool) -> None:
    assert pool.take(BLOCKS) == list(range(BLOCKS))
    pool.free(*range(BLOCKS))
    pool.use(3)
    pool.queue.prepend_n([pool.blocks[3]])
    assert pool.take(4) == [3, 0, 1, 2]
    assert pool.queue.num_free_blocks == BLOCKS - 4


def test_claimed_blocks_go_by_rank_and_the_end_of_a_prompt_first(pool: Pool) -> None:
    pool.take(BLOCKS)
    pool.claim(HIGH, 0, 1, 2)
    pool.claim(LOW, 3, 4, 5)
    pool.free(5, 4, 3, 2, 1, 0, *range(6, BLOCKS))
    assert pool.take(BLOCKS) == [5, 4, 3, *range(6, BLOCKS), 2, 1, 0]
    assert not pool.runs.retained
    assert not pool.budget.charged


def test_empty_blocks_go_before_those_of_any_rank(pool: Pool) -> None:
    pool.take(BLOCKS)
    pool.claim(LOW, 3, 4)
    pool.free(4, 3, *range(5, BLOCKS))
    for block in pool.blocks[:3]:
        block.block_hash = None
    pool.queue.prepend_n(pool.blocks[:3])
    assert pool.take(6) == [0, 1, 2, 4, 3, 5]


def test_a_used_block_leaves_its_run_in_the_order(pool: Pool) -> None:
    pool.take(BLOCKS)
    pool.claim(HIGH, 0, 1, 2)
    pool.free(2, 1, 0, *range(3, BLOCKS))
    pool.use(1)
    assert pool.take(BLOCKS - 1) == [*range(3, BLOCKS), 2, 0]
    assert (pool.runs.retained, pool.budget.charged) == (1, {"tenant": 1})
    pool.free(1)
    assert pool.take(1) == [1]


def test_an_expired_claim_leaves_the_place_of_the_last_use(pool: Pool) -> None:
    pool.take(BLOCKS)
    pool.claim(RetentionWish(90, 5.0), 0)
    pool.claim(HIGH, 9)
    pool.free(1)
    pool.free(0)
    pool.free(2)
    pool.now = 10.0
    assert pool.take(3) == [1, 0, 2]


def test_doubtful_blocks_go_first_for_that_reason_unless_they_are_retained(pool: Pool) -> None:
    pool.take(BLOCKS)
    for block in pool.blocks:
        block.block_hash = b"%d" % block.block_id
    pool.claim(LOW, 0)
    pool.claim(HIGH, 5)
    pool.free(*range(BLOCKS - 1, -1, -1))
    pool.doubt(True, 3, 4, 5)
    assert pool.take(3) == [4, 3, 0]
    assert pool.runs.lapsed == {b"4": "superseded", b"3": "superseded"}
    assert pool.runs.evictions["claim"] == 3
    assert pool.take(BLOCKS - 3)[-1] == 5
    assert not pool.runs.retained


def test_of_the_blocks_that_are_used_again_there_is_no_doubt_any_more(pool: Pool) -> None:
    pool.take(BLOCKS)
    pool.free(*range(BLOCKS - 1, -1, -1))
    pool.doubt(True, 2, 3, 4, 5)
    pool.use(2, 3)
    pool.free(3, 2)
    assert pool.runs.retained == 2
    pool.use(2)
    pool.claim(RetentionWish(40, 5.0), 2)
    pool.free(2)
    pool.doubt(True, 9)
    pool.doubt(False, 9)
    pool.doubt(True, 2)
    pool.now = 10.0
    assert pool.take(3) == [5, 4, 2]
    assert pool.take(BLOCKS - 3)[-2:] == [3, 9]


def test_blocks_that_are_not_doubtful_any_more_are_evicted_as_others(pool: Pool) -> None:
    pool.take(BLOCKS)
    pool.free(0)
    pool.doubt(True, 0)
    pool.doubt(False, 0)
    assert pool.take(1) == [0]
    assert (pool.runs.lapsed, pool.runs.retained) == ({}, 0)


def test_blocks_without_content_lose_their_claims(pool: Pool) -> None:
    pool.take(BLOCKS)
    pool.claim(HIGH, 0, 1)
    pool.free(5, 1)
    pool.queue.prepend_n([pool.blocks[0]])
    pool.queue.forget(pool.blocks)
    assert pool.queue.num_free_blocks == len(pool.queue.get_all_free_blocks()) == 3
    assert not pool.budget.charged
    assert pool.take(3) == [0, 1, 5]


def test_too_many_blocks_are_refused(pool: Pool) -> None:
    pool.take(BLOCKS - 1)
    with pytest.raises(ValueError, match="2 blocks were requested, 1 are free"):
        pool.take(2)
    with pytest.raises(RuntimeError, match="block 0 is not free"):
        pool.use(0)


Step = tuple[str, int, int]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["take", "free", "use", "high", "low", "plain", "wait", "doubt", "trust"]
            ),
            st.integers(0, BLOCKS - 1),
            st.integers(1, 6),
        ),
        max_size=60,
    )
)
def test_blocks_are_taken_by_level_and_the_counts_stay_exact(steps: list[Step]) -> None:
    pool = Pool(max_size=BLOCKS // 2)
    free: OrderedDict[int, None] = OrderedDict.fromkeys(range(BLOCKS))
    known = dict.fromkeys(range(BLOCKS), 35)
    for action, number, count in steps:
        pool.now += 1.0
        some = [(number + i) % BLOCKS for i in range(count)]
        used = [n for n in some if n not in free]
        if action == "take" and count <= len(free):
            levels = sorted(level(pool, n) for n in free)
            taken = pool.take(count)
            assert levels[:count] == sorted(known.pop(n, 35) for n in taken)
            for n in taken:
                del free[n]
        elif action == "free":
            pool.free(*used)
            free.update(dict.fromkeys(used))
        elif action == "use":
            there = [n for n in some if n in free]
            pool.use(*there)
            for n in there:
                del free[n]
        elif action in ("doubt", "trust"):
            there = [n for n in some if n in free]
            pool.doubt(action == "doubt", *there)
        elif action in ("high", "low", "plain") and used:
            pool.claim({"high": HIGH, "low": LOW, "plain": DEFAULT}[action], *used)
        known = {n: level(pool, n) for n in range(BLOCKS)}
        assert pool.queue.num_free_blocks == len(free)
        assert {b.block_id for b in pool.queue.get_all_free_blocks()} == set(free)
        assert pool.runs.retained == sum(run is not None for run in pool.runs.by_block)
        assert sum(pool.budget.charged.values()) == sum(value > 35 for value in known.values())


def level(pool: Pool, number: int) -> int:
    """The level of a block's rank now."""
    run = pool.runs.by_block[number]
    return 35 if run is None else run.eviction_rank(pool.now).level
