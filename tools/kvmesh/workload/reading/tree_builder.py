"""Grows a token tree from the ids of blocks."""

from collections.abc import Iterable

from kvmesh.workload.tree import ROOT, Tree


class TreeBuilder:
    """Grows a tree from block ids; an id identifies a block and all blocks before it."""

    def __init__(self, tree: Tree, block_size: int) -> None:
        self._tree = tree
        self._size = block_size
        self._known: dict[tuple[int, int] | int, tuple[int, int, int]] = {}
        self._contents: dict[tuple[int, int, int], int] = {}
        self._tips: dict[int, int] = {}
        self.conflicts: list[int] = []

    def add(self, ids: Iterable[int]) -> int:
        """The branch of a prompt; ids seen before with another parent go to `conflicts`."""
        branch, before = ROOT, ROOT
        for depth, block in enumerate(ids):
            key: tuple[int, int] | int = block
            known = self._known.get(key)
            if known is not None and known[1:] != (depth, before):
                self.conflicts.append(block)
                key = (before, block)
                known = self._known.get(key)
            if known is None:
                branch = self._grow(branch, depth)
                self._known[key] = (branch, depth, before)
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
