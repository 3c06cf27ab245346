"""An infinite prefix cache over the token tree: exact hits, at a cost per branch."""

from msgspec import structs

from kvmesh.workload.model import Workload
from kvmesh.workload.tree import ROOT, Tree


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
        parents, starts, ends = self._tree.parents, self._tree.starts, self._ends
        end = tokens
        while branch != ROOT:
            start = starts[branch]
            if start < end:
                held = ends.get(branch, 0)
                if held < end:
                    ends[branch] = end
                if held > start:
                    return min(held, end) // self._size * self._size
                end = start
            branch = parents[branch]
        return 0


def ideal_hits(workload: Workload, block_size: int) -> list[int]:
    """Tokens of each prompt that an infinite cache would hold, in the order of the rounds."""
    tree = workload.tree
    cache = InfiniteCache(tree, block_size)
    read = bytearray(len(tree) + 1)  # branches of prompts, and those that others continue
    for branch in tree.parents:
        read[branch] = 1
    for round_ in workload.rounds:
        read[round_.branch] = 1
    hits: list[int] = []
    for round_ in workload.rounds:
        tokens = round_.input_tokens
        hits.append(cache.add(round_.branch, tokens))
        if read[round_.output_branch]:
            cache.add(round_.output_branch, tokens + round_.output_tokens)
    return hits


def link_outputs(workload: Workload) -> None:
    """Set the output branch of each round whose output the session's next prompt can contain.

    Traces list the blocks of prompts only. The next prompt is assumed to contain the output if it
    repeats all full blocks of the prompt and is long enough for prompt and output.
    """
    tree, rounds, size = workload.tree, workload.rounds, workload.block_size
    last: dict[int, int] = {}
    for successor, after in enumerate(rounds):
        index = last.get(after.session)
        last[after.session] = successor
        if index is None:
            continue
        before = rounds[index]
        full = before.input_tokens // size * size
        if after.input_tokens < before.input_tokens + before.output_tokens or not full:
            continue
        if tree.shared(before.branch, after.branch, full) == full:
            rounds[index] = structs.replace(before, output_branch=after.branch)
