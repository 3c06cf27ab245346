"""An infinite prefix cache over the token tree: exact hits, at a cost per branch."""

from itertools import pairwise

from msgspec import structs

from kvmesh.workload.model import Workload
from kvmesh.workload.tree import Tree


class InfiniteCache:
    """Holds every prompt and output added so far.

    Of a branch it holds one run of tokens from the branch's start, and the whole path before it.
    """

    def __init__(self, tree: Tree, block_size: int = 1) -> None:
        self._tree = tree
        self._size = block_size
        self._ends: dict[int, int] = {}

    def hit(self, branch: int, tokens: int) -> int:
        """Cached prefix of a prompt in tokens, rounded down to whole blocks."""
        for part, start, end in self._tree.reversed_path(branch, tokens):
            held = self._ends.get(part, 0)
            if held > start:
                return min(held, end) // self._size * self._size
        return 0

    def add(self, branch: int, tokens: int) -> int:
        """Add the first `tokens` tokens along `branch`; return their previous `hit`."""
        for part, start, end in self._tree.reversed_path(branch, tokens):
            held = self._ends.get(part, 0)
            if held < end:
                self._ends[part] = end
            if held > start:
                return min(held, end) // self._size * self._size
        return 0


def ideal_hits(workload: Workload, block_size: int) -> list[int]:
    """Tokens of each prompt that an infinite cache would hold, in the order of the rounds."""
    cache = InfiniteCache(workload.tree, block_size)
    hits: list[int] = []
    for round_ in workload.rounds:
        hits.append(cache.add(round_.branch, round_.input_tokens))
        cache.add(round_.output_branch, round_.input_tokens + round_.output_tokens)
    return hits


def link_outputs(workload: Workload, members: list[int]) -> None:
    """Set the output branch of each round whose output the session's next prompt can contain.

    Traces list the blocks of prompts only. The next prompt is assumed to contain the output if it
    repeats all full blocks of the prompt and is long enough for prompt and output.
    """
    tree, rounds, size = workload.tree, workload.rounds, workload.block_size
    for index, successor in pairwise(members):
        before, after = rounds[index], rounds[successor]
        full = before.input_tokens // size * size
        if after.input_tokens < before.input_tokens + before.output_tokens or not full:
            continue
        if tree.shared(before.branch, after.branch, full) == full:
            rounds[index] = structs.replace(before, output_branch=after.branch)
