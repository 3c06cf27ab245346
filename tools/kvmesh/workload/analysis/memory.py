"""The share of prompts that a cache of limited size would hold: one LRU over all requests."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kvmesh.workload.analysis.sharing import ideal_hits
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.window import TOKEN_S, planned_starts

# Blocks are enlarged until all prompts have at most so many.
MOST_TOUCHES = 500_000
_LEAST_BLOCK = 16


def touched_block_size(workload: Workload) -> int:
    """Tokens per block with which a workload is quick to run through a cache."""
    size = max(workload.block_size, _LEAST_BLOCK)
    total = sum(round_.input_tokens + round_.output_tokens for round_ in workload.rounds)
    while total // size > MOST_TOUCHES:
        size *= 2
    return size


def held_shares(workload: Workload, capacities: Sequence[int], block_size: int) -> list[float]:
    """Shares of prompt tokens found in LRU caches of `capacities` tokens.

    Rounds come in the order of their planned starts. A prompt is found up to its first missing
    block. Its last blocks are evicted first.
    """
    total = sum(round_.input_tokens for round_ in workload.rounds) or 1
    caches = [_LruBlocks(capacity // block_size) for capacity in capacities]
    tree = workload.tree
    for index in np.argsort(planned_starts(workload, TOKEN_S), kind="stable").tolist():
        round_ = workload.rounds[index]
        prompt = tree.blocks(round_.branch, round_.input_tokens, block_size).tolist()
        ends = round_.input_tokens + round_.output_tokens
        kept = tree.blocks(round_.output_branch, ends, block_size).tolist()
        for cache in caches:
            cache.read(prompt)
            cache.write(kept)
    return [cache.hits * block_size / total for cache in caches]


class _LruBlocks:
    """A cache of `capacity` blocks, in the order of their last use."""

    def __init__(self, capacity: int) -> None:
        self.hits = 0
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def read(self, blocks: list[int]) -> None:
        for block in blocks:
            if block not in self._blocks:
                break
            self.hits += 1

    def write(self, blocks: list[int]) -> None:
        held = self._blocks
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._capacity:
            held.popitem(last=False)


def memory_line(workload: Workload, tokens: int) -> str:
    """The ideal shares with infinite memory, with `tokens` tokens of it, and with half."""
    size = touched_block_size(workload)
    total = sum(round_.input_tokens for round_ in workload.rounds) or 1
    ideal = sum(ideal_hits(workload, size)) / total
    this, half = held_shares(workload, (tokens, tokens // 2), size)
    return (
        f"ideal share {ideal:.1%} with infinite memory, {this:.1%} with this fleet's "
        f"{tokens:,} tokens, {half:.1%} with half (one LRU cache, blocks of {size})"
    )
