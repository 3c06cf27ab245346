"""Cost of retention in vLLM's block pool: its own free queue and the retaining one, in turns.

    python benchmarks/vllm_retention.py [--blocks 100000] [--rounds 7]

Needs vLLM. A round allocates 64 blocks and frees them with content, and hits 64 cached blocks and
frees them; both queues do the same rounds alternately. Prints microseconds (median over the rounds)
and the ratio to vLLM's queue: with no block claimed, with all claimed, and with all forecast.
"""

import argparse
import statistics
import time
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import RetentionWish
from kvmesh.retention.return_value import Expectation
from kvmesh.returns.rates import BINS
from kvmesh.worker.engines.vllm.retention.block_queue import RetainingBlockQueue
from kvmesh.worker.engines.vllm.retention.block_runs import RetainedRuns

BATCH = 64
REPEATS = 200
LEVELS = (50, 60, 80, 90)


class Subject:
    """A block pool whose blocks are all cached and free; `retaining` has the new queue.

    `expected`: something is expected of each block.
    """

    def __init__(self, blocks: int, retaining: bool, claimed: bool, expected: bool = False) -> None:
        self.expected = expected
        self.pool = BlockPool(blocks, True, 16)
        self.runs: RetainedRuns | None = None
        self.budget = RetentionBudget(blocks)
        self.claimed = claimed
        self._hashes = 0
        if retaining:
            self.runs = RetainedRuns(self.pool.blocks, self.budget)
            old, block_type = self.pool.free_block_queue, type(self.pool.blocks[0])
            self.pool.free_block_queue = RetainingBlockQueue(
                old, block_type, self.runs, time.monotonic
            )
        for _ in range((blocks - 1) // BATCH):
            self.allocate_and_free()

    def allocate_and_free(self) -> None:
        """A request of 64 new blocks, claimed if so configured."""
        blocks = self.pool.get_new_blocks(BATCH)
        for block in blocks:
            self._hashes += 1
            key = make_block_hash_with_group_id(self._hashes.to_bytes(32, "big"), 0)
            self.pool._insert_block_hash(key, block, num_tokens=16)
        self._claim(blocks)
        self.pool.free_blocks(reversed(blocks))

    def hit_and_free(self, first: int) -> None:
        """A request that hits 64 cached blocks."""
        blocks = self.pool.blocks[first : first + BATCH]
        self.pool.touch(blocks)
        self._claim(blocks)
        self.pool.free_blocks(reversed(blocks))

    def _claim(self, blocks: list[Any]) -> None:
        if self.runs is None or not (self.claimed or self.expected):
            return
        ids = [block.block_id for block in blocks]
        if self.expected:
            self._expect(self.runs, ids)
            return
        wish, now = RetentionWish(LEVELS[ids[0] // BATCH % len(LEVELS)]), time.monotonic()
        for start, stop, run in list(self.runs.segments(ids)):
            part = ids[start:stop]
            made = self.runs.isolate(part, run, "tenant")
            self.budget.claim(made.retention, len(part), wish, now)
            self.runs.update(made, part, now)

    def _expect(self, runs: RetainedRuns, ids: list[int]) -> None:
        """Of each request another rate, which falls with age."""
        now = time.monotonic()
        rate = 2.0 ** -(ids[0] // BATCH % 12)
        expectation = Expectation(now, tuple(rate * 0.5**k for k in range(BINS)))
        for start, stop, run in list(runs.segments(ids)):
            part = ids[start:stop]
            runs.expect(runs.isolate(part, run, ""), part, expectation, now)


def measure(subject: Subject, blocks: int) -> tuple[float, float]:
    """Microseconds of one allocation and of one hit of 64 blocks, each with its release."""
    start = time.perf_counter()
    for _ in range(REPEATS):
        subject.allocate_and_free()
    middle = time.perf_counter()
    for number in range(REPEATS):
        subject.hit_and_free(1 + BATCH * (number * 37 % (blocks // BATCH - 1)))
    end = time.perf_counter()
    return (middle - start) / REPEATS * 1e6, (end - middle) / REPEATS * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    subjects = {
        "vLLM's queue": Subject(options.blocks, False, False),
        "retaining, none claimed": Subject(options.blocks, True, False),
        "retaining, all claimed": Subject(options.blocks, True, True),
        "retaining, all forecast": Subject(options.blocks, True, False, expected=True),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for _ in range(options.rounds):
        for name, subject in subjects.items():
            found[name].append(measure(subject, options.blocks))
    base = found["vLLM's queue"]
    print(f"{options.blocks} blocks, {BATCH} at a time: us (ratio to vLLM's queue)")
    print(f"{'':26}{'allocate and free':>22}{'hit and free':>22}")
    for name, rounds in found.items():
        cells = ""
        for column in (0, 1):
            value = statistics.median(r[column] for r in rounds)
            pairs = zip(rounds, base, strict=True)
            ratio = statistics.median(r[column] / b[column] for r, b in pairs)
            cells += f"{f'{value:.0f} ({ratio:.2f})':>22}"
        print(f"{name:26}{cells}")


if __name__ == "__main__":
    main()
