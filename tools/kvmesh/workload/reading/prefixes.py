"""The prefixes that prompts share, from all their block ids at once."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.workload.tree import ROOT, Tree

Ids = Sequence[Sequence[int]]
SPARSE = 8  # numbers per id up to which a table of all numbers is smaller than sorting


class SharedPrefixes:
    """Grows a tree by prompts, in order, as `TreeBuilder` does.

    `shared[n]` is the number of leading blocks of prompt n that earlier ones hold, and `source[n]`
    the prompt that brought the last of these.
    """

    def __init__(self, tree: Tree, block_size: int, shared: list[int], source: list[int]) -> None:
        self._tree = tree
        self._size = block_size
        self._shared = shared
        self._source = source
        self._branches = array("q")
        self._tips: dict[int, int] = {}

    def add(self, blocks: int) -> int:
        """The branch of the next prompt, of so many blocks."""
        number = len(self._branches)
        shared = self._shared[number]
        branch = self._branches[self._source[number]] if shared else ROOT
        if shared < blocks:
            if branch == ROOT or self._tips[branch] != shared:
                branch = self._tree.fork(branch, shared * self._size)
            self._tips[branch] = blocks
        self._branches.append(branch)
        return branch


def shared_prefixes(
    tree: Tree, block_size: int, ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> SharedPrefixes | None:
    """The prefixes of prompts whose ids stand one after the other in `ids`, at least one each.

    None if an id follows another id elsewhere: then it does not stand for a whole prefix.
    """
    codes, count = _coded(ids)
    begins = np.cumsum(lengths) - lengths
    first = np.empty(count, np.int32)
    # Of several assignments to one place, the last one holds: the first occurrence.
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1, dtype=np.int32)
    before = np.empty_like(codes)
    before[1:] = codes[:-1]
    before[begins] = -1
    firsts = first[codes]
    if not np.array_equal(before[firsts], before):
        return None
    del before, codes
    owners = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    brought = owners[firsts]
    del firsts
    shared = np.add.reduceat(brought < owners, begins, dtype=np.int32)
    source = brought[begins + np.maximum(shared - 1, 0)]
    return SharedPrefixes(tree, block_size, shared.tolist(), source.tolist())


def _coded(ids: NDArray[np.int64]) -> tuple[NDArray[np.int32], int]:
    """Small numbers in place of ids, and their bound."""
    low, high = int(ids.min()), int(ids.max())
    if high - low <= SPARSE * len(ids):
        return (ids - low).astype(np.int32), high - low + 1
    known, codes = np.unique(ids, return_inverse=True)
    return codes.astype(np.int32).reshape(-1), len(known)


def joined(ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """All ids one after the other, and the number of each prompt; None if some exceed 64 bits."""
    codes = {each.typecode if isinstance(each, array) else "" for each in ids}
    if len(codes) != 1 or "" in codes:
        return None
    flat = array(codes.pop())
    for each in ids:
        flat.extend(each)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.frombuffer(flat, np.int64), lengths
