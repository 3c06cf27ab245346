"""The prefixes that prompts share, from all their block ids at once."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.workload.reading.rows import TraceRow
from kvmesh.workload.tree import ROOT, Tree

PART = 1 << 16
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
    tree: Tree, block_size: int, ids: "array[int]", lengths: NDArray[np.int64]
) -> SharedPrefixes | None:
    """The prefixes of prompts whose ids stand one after the other in `ids`, at least one each.

    None if an id follows another id elsewhere: then it does not stand for a whole prefix.
    """
    codes, count = _coded(ids)
    begins = np.cumsum(lengths) - lengths
    first = np.empty(count, np.int32)
    # Of several assignments to one place, the last one holds: the first occurrence.
    for part in reversed(_parts(len(codes))):
        places = np.arange(part.start, part.stop, dtype=np.int32)
        first[codes[part][::-1]] = places[::-1]
    before = np.empty_like(codes)
    before[1:] = codes[:-1]
    before[begins] = -1
    firsts = _taken(first, codes)
    del first, codes
    parts = _parts(len(firsts))
    if not all(np.array_equal(before[firsts[part]], before[part]) for part in parts):
        return None
    del before
    owners = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    brought = _taken(owners, firsts)
    del firsts
    earlier = brought < owners
    del owners
    shared = np.empty(len(lengths), np.int32)
    for part in _parts(len(lengths)):
        here = begins[part]
        end = here[-1] + lengths[part][-1]
        shared[part] = np.add.reduceat(earlier[here[0] : end], here - here[0], dtype=np.int32)
    source = brought[begins + np.maximum(shared - 1, 0)]
    return SharedPrefixes(tree, block_size, shared.tolist(), source.tolist())


def _parts(length: int) -> list[slice]:
    """Parts of an array of places, of which numpy makes a copy twice as wide to look them up."""
    return [slice(at, min(at + PART, length)) for at in range(0, length, PART)]


def _taken(values: NDArray[np.int32], places: NDArray[np.int32]) -> NDArray[np.int32]:
    """The values at some places."""
    taken = np.empty_like(places)
    for part in _parts(len(places)):
        taken[part] = values[places[part]]
    return taken


def _coded(array_of_ids: "array[int]") -> tuple[NDArray[np.int32], int]:
    """Small numbers in place of ids, and their bound."""
    width = np.int32 if array_of_ids.itemsize == np.int32().itemsize else np.int64
    ids = np.frombuffer(array_of_ids, width)
    low, high = int(ids.min()), int(ids.max())
    if high - low <= SPARSE * len(ids):
        return (ids - low).astype(np.int32), high - low + 1
    known, codes = np.unique(ids, return_inverse=True)
    return codes.astype(np.int32).reshape(-1), len(known)


def joined(rows: Sequence[TraceRow]) -> tuple["array[int]", NDArray[np.int64]] | None:
    """All ids one after the other, and the number of each row's; None if some exceed 64 bits.

    The rows keep a range in place of their ids, see `separate`.
    """
    codes = {row.ids.typecode if isinstance(row.ids, array) else "" for row in rows}
    if codes == {"i", "q"}:
        codes = {"q"}
    if len(codes) != 1 or "" in codes:
        return None
    code = codes.pop()
    flat = array(code)
    lengths = np.fromiter((len(row.ids) for row in rows), np.int64, len(rows))
    for row in rows:
        flat.extend(array(code, row.ids))
        row.ids = range(len(row.ids))
    return flat, lengths


def separate(rows: Sequence[TraceRow], flat: "array[int]") -> None:
    """Give the rows their ids back."""
    begin = 0
    for row in rows:
        end = begin + len(row.ids)
        row.ids = flat[begin:end]
        begin = end
