"""Compressed radix tree of prompt prefixes with reference counts per rank.

Sequence hashes are chained, so two prompts that agree on one hash agree on everything before it.
A whole edge is therefore compared at once, and the point where two prompts diverge is found by
bisection: cost grows with the number of branches on the path, not with the number of blocks.
"""

import numpy as np

from kvmesh.hashing import HASH_BYTES
from kvmesh.router.state.arrays import Floats

_SPARSE = 12


class PrefixNode:
    """A run of blocks. `ranks` counts, per slot, the sequences that pass through or end here.

    `mask` has a bit for each slot in `ranks`; `ends` counts the sequences that end here.
    """

    __slots__ = ("children", "depth", "ends", "label", "mask", "parent", "ranks")

    def __init__(self, label: bytes, depth: int, parent: "PrefixNode | None") -> None:
        self.label = label
        self.depth = depth
        self.parent = parent
        self.children: dict[bytes, PrefixNode] = {}
        self.ranks: dict[int, int] = {}
        self.mask = 0
        self.ends = 0

    def acquire(self, slot: int) -> bool:
        """Add a reference of `slot`; returns whether it is the first."""
        held = self.ranks.get(slot, 0)
        self.ranks[slot] = held + 1
        if held:
            return False
        self.mask |= 1 << slot
        return True

    def release(self, slot: int) -> bool:
        """Drop a reference of `slot`; returns whether it was the last."""
        left = self.ranks[slot] - 1
        if left:
            self.ranks[slot] = left
            return False
        del self.ranks[slot]
        self.mask ^= 1 << slot
        return True


class PrefixTree:
    """Prompts held by slots; a prompt is its packed sequence hashes, 8 bytes per block.

    `root` is an empty run, at which all prompts begin.
    """

    def __init__(self) -> None:
        self.root = PrefixNode(b"", 0, None)

    @property
    def empty(self) -> bool:
        return not self.root.children

    def add(self, slot: int, hashes: bytes) -> tuple[PrefixNode, int]:
        """Add a prompt to `slot`; returns its end node, for `drop`, and the blocks it adds."""
        node, at, new = self.root, 0, 0
        while at < len(hashes):
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                child = self._grow(node, hashes[at:])
            elif not hashes.startswith(child.label, at):
                child = self._split(child, common_prefix(child.label, hashes, at))
            if child.acquire(slot):
                new += len(child.label) // HASH_BYTES
            node, at = child, at + len(child.label)
        node.ends += 1
        return node, new

    def drop(self, end: PrefixNode, slot: int) -> int:
        """Undo one `add`; returns the number of blocks that `slot` no longer holds."""
        end.ends -= 1
        freed = 0
        node = end
        while node.parent is not None:
            parent = node.parent
            if node.release(slot):
                freed += len(node.label) // HASH_BYTES
            if not node.ranks:
                del parent.children[node.label[:HASH_BYTES]]
            elif len(node.children) == 1 and not node.ends:
                self._merge(node, parent)
            node = parent
        return freed

    def depths(self, hashes: bytes, size: int) -> Floats:
        """Leading blocks of a prompt that each of `size` slots holds."""
        path: list[tuple[int, int]] = []
        children, at, length = self.root.children, 0, len(hashes)
        while at < length:
            child = children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                break
            if not hashes.startswith(child.label, at):
                path.append(
                    (child.mask, (at + common_prefix(child.label, hashes, at)) // HASH_BYTES)
                )
                break
            path.append((child.mask, child.depth))
            children = child.children
            at += len(child.label)
        return _deepest(path, size)

    def _grow(self, parent: PrefixNode, label: bytes) -> PrefixNode:
        node = PrefixNode(label, parent.depth + len(label) // HASH_BYTES, parent)
        parent.children[label[:HASH_BYTES]] = node
        return node

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Split `node`'s label at `at`; the lower part stays `node`, as prompts end there."""
        upper = self._grow(node.parent or self.root, node.label[:at])
        upper.ranks = dict(node.ranks)
        upper.mask = node.mask
        node.label = node.label[at:]
        node.parent = upper
        upper.children[node.label[:HASH_BYTES]] = node
        return upper

    def _merge(self, node: PrefixNode, parent: PrefixNode) -> None:
        """Merge a node at which no prompt ends into its only child."""
        (child,) = node.children.values()
        child.label = node.label + child.label
        child.parent = parent
        parent.children[child.label[:HASH_BYTES]] = child


def _deepest(path: list[tuple[int, int]], size: int) -> Floats:
    """The deepest entry of each slot; masks only shrink downwards, so the path is walked back."""
    depths = np.zeros(size)
    below = 0
    for mask, depth in reversed(path):
        fresh = mask ^ below
        below = mask
        if not fresh:
            continue
        if fresh.bit_count() > _SPARSE:
            depths[_bits(fresh, size)] = depth
            continue
        while fresh:
            top = fresh.bit_length() - 1
            fresh ^= 1 << top
            depths[top] = depth
    return depths


def _bits(mask: int, size: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)


def common_prefix(label: bytes, hashes: bytes, at: int) -> int:
    """Length in bytes of the common prefix of `label` and `hashes[at:]`; at least one hash."""
    low, high = 1, min(len(label), len(hashes) - at) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start = (middle - 1) * HASH_BYTES
        if hashes.startswith(label[start : start + HASH_BYTES], at + start):
            low = middle
        else:
            high = middle - 1
    return low * HASH_BYTES
