"""Grows a token tree from the ids of blocks."""

from collections.abc import Iterable

from kvmesh.workload.tree import ROOT, Tree


class TreeBuilder:
    """Grows a tree from block ids; an id identifies a block and all blocks before it.

    Each branch keeps its ids as a list, so that a prompt is compared by runs of blocks. The first
    id behind other blocks than elsewhere ends that: from then on blocks are looked up one by one.
    """

    def __init__(self, tree: Tree, block_size: int) -> None:
        self._tree = tree
        self._size = block_size
        self._branch_of: dict[int, int] = {}
        self._runs: dict[int, tuple[int, list[int]]] = {}
        self._known: dict[tuple[int, int] | int, tuple[int, int, int]] | None = None
        self._contents: dict[tuple[int, int, int], int] = {}
        self._tips: dict[int, int] = {}
        self.conflicts: list[int] = []

    def add(self, ids: Iterable[int]) -> int:
        """The branch of a prompt; ids seen before with another parent go to `conflicts`."""
        blocks = list(ids)
        if self._known is None:
            branch = self._add_runs(blocks)
            if branch is not None:
                return branch
            self._known = self._one_by_one()
        return self._add_blocks(blocks, self._known)

    def _add_runs(self, blocks: list[int]) -> int | None:
        """The branch of a prompt; None, and nothing added, if an id follows other blocks."""
        branch, depth = ROOT, 0
        while depth < len(blocks):
            found = self._branch_of.get(blocks[depth])
            if found is None:
                return self._add_new(branch, depth, blocks)
            if self._tree.parent(found) != (branch, depth * self._size):
                return None
            start, run = self._runs[found]
            if start != depth or run[0] != blocks[depth]:
                return None
            branch = found
            depth += _common(run, blocks[depth : depth + len(run)])
        return branch if branch != ROOT else self._tree.fork()

    def _add_new(self, branch: int, depth: int, blocks: list[int]) -> int | None:
        """The branch of a prompt of which the blocks from `depth` on are new."""
        new = blocks[depth:]
        if len(set(new)) < len(new) or not self._branch_of.keys().isdisjoint(new):
            return None
        start, run = self._runs.get(branch, (0, []))
        if branch == ROOT or start + len(run) != depth:
            branch = self._tree.fork(branch, depth * self._size)
            self._runs[branch] = (depth, new)
        else:
            run.extend(new)
        self._branch_of.update(dict.fromkeys(new, branch))
        return branch

    def _one_by_one(self) -> dict[tuple[int, int] | int, tuple[int, int, int]]:
        """(branch, depth, id before) of each known id."""
        known: dict[tuple[int, int] | int, tuple[int, int, int]] = {}
        for branch, (start, run) in self._runs.items():
            parent, _ = self._tree.parent(branch)
            before = ROOT
            if parent != ROOT:
                begin, ids = self._runs[parent]
                before = ids[start - begin - 1]
            for depth, block in enumerate(run, start):
                known[block] = (branch, depth, before)
                before = block
            self._tips[branch] = start + len(run)
        self._branch_of.clear()
        self._runs.clear()
        return known

    def _add_blocks(
        self, blocks: list[int], all_known: dict[tuple[int, int] | int, tuple[int, int, int]]
    ) -> int:
        branch, before = ROOT, ROOT
        for depth, block in enumerate(blocks):
            key: tuple[int, int] | int = block
            known = all_known.get(key)
            if known is not None and known[1:] != (depth, before):
                self.conflicts.append(block)
                key = (before, block)
                known = all_known.get(key)
            if known is None:
                branch = self._grow(branch, depth)
                all_known[key] = (branch, depth, before)
            else:
                branch = known[0]
            before = block
        return branch if branch != ROOT else self._tree.fork()

    def add_contents(self, ids: Iterable[int]) -> int:
        """The branch of a prompt where an id identifies a block's own tokens only."""
        branch = ROOT
        for depth, block in enumerate(ids):
            key = (branch, depth, block)
            known = self._contents.get(key)
            branch = self._grow(branch, depth) if known is None else known
            self._contents[key] = branch
        return branch if branch != ROOT else self._tree.fork()

    def _grow(self, branch: int, depth: int) -> int:
        if branch == ROOT or self._tips[branch] != depth:
            branch = self._tree.fork(branch, depth * self._size)
        self._tips[branch] = depth + 1
        return branch


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common start of two lists of which the first items are equal."""
    low, high = 1, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
