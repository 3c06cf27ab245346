"""What an infinite prefix cache would hold and hit: exact, at a cost per branch, not per block."""

from itertools import pairwise

from msgspec import structs

from kvmesh.workload.model import Workload
from kvmesh.workload.tree import Tree


class InfiniteCache:
    """Every prompt and answer so far.

    What it holds of a branch is one run of tokens from its start, and then all before that too.
    """

    def __init__(self, tree: Tree, block_size: int = 1) -> None:
        self._tree = tree
        self._size = block_size
        self._ends: dict[int, int] = {}

    def hit(self, branch: int, tokens: int) -> int:
        """Leading tokens of a prompt that are held, in whole blocks."""
        for part, start, end in self._tree.reversed_path(branch, tokens):
            held = self._ends.get(part, 0)
            if held > start:
                return min(held, end) // self._size * self._size
        return 0

    def add(self, branch: int, tokens: int) -> int:
        """Hold the first `tokens` tokens along `branch`; returns the `hit` that they were."""
        for part, start, end in self._tree.reversed_path(branch, tokens):
            held = self._ends.get(part, 0)
            if held < end:
                self._ends[part] = end
            if held > start:
                return min(held, end) // self._size * self._size
        return 0


def ideal_hits(workload: Workload, block_size: int) -> list[int]:
    """Tokens of each round's prompt that an infinite cache would have, in the workload's order."""
    cache = InfiniteCache(workload.tree, block_size)
    hits: list[int] = []
    for round_ in workload.rounds:
        hits.append(cache.add(round_.branch, round_.input_tokens))
        cache.add(round_.output_branch, round_.input_tokens + round_.output_tokens)
    return hits


def link_outputs(workload: Workload, members: list[int]) -> None:
    """Let answers lie on the next prompt of their session wherever that prompt can contain them.

    Traces name the blocks of prompts alone. A following prompt that repeats all full blocks of a
    prompt and is long enough for its answer too is taken to contain it.
    """
    tree, rounds, size = workload.tree, workload.rounds, workload.block_size
    for place, follower in pairwise(members):
        before, after = rounds[place], rounds[follower]
        full = before.input_tokens // size * size
        if after.input_tokens < before.input_tokens + before.output_tokens or not full:
            continue
        if tree.shared(before.branch, after.branch, full) == full:
            rounds[place] = structs.replace(before, output_branch=after.branch)
