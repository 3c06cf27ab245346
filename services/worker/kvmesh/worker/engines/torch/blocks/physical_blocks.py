"""Maps the logical blocks of the block manager to physical blocks of the KV pool.

The block manager counts blocks and identifies full ones by sequence hash; this module assigns their
block ids. Both apply the same operations in the same order, so a free block id exists for every
block that the manager has allocated.
"""

from array import array
from collections.abc import Iterable

from kvmesh.bus.messages import KvEvent, Removed
from kvmesh.worker.enginecore.sequence import Sequence, SequenceState


class BlockTable:
    """Block ids of one sequence, in order; the first `cached` are registered by hash.

    Those of loaded blocks further back are `ahead`, by the position of the block.
    """

    __slots__ = ("ahead", "block_ids", "cached", "sequence")

    def __init__(self, sequence: Sequence, block_ids: list[int]) -> None:
        self.sequence = sequence
        self.block_ids = block_ids
        self.cached = len(block_ids)
        self.ahead: dict[int, int] = {}

    @property
    def unregistered(self) -> list[int]:
        """Block ids that are not registered by hash."""
        return [*self.block_ids[self.cached :], *self.ahead.values()]


class PhysicalBlocks:
    """Block ids 0 … `blocks` - 1: each is free, private to one sequence, or registered by hash."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, -1, -1))
        self._deferred_free: list[int] = []
        self._by_hash: dict[int, int] = {}
        self._tables: dict[str, BlockTable] = {}

    @property
    def contents(self) -> set[int]:
        """Sequence hashes of all registered blocks."""
        return set(self._by_hash)

    @property
    def free(self) -> int:
        """Number of free block ids, including those to be freed after the step."""
        return len(self._free) + len(self._deferred_free)

    @property
    def allocatable(self) -> int:
        """Number of block ids that can be allocated now, even during a step."""
        return len(self._free)

    def block_ids(self, hashes: Iterable[int]) -> list[int]:
        """Block ids of registered blocks; raises KeyError with the first missing hash."""
        return [self._by_hash[sequence_hash] for sequence_hash in hashes]

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Free the block ids of evicted blocks."""
        for event in events:
            if isinstance(event, Removed):
                self._free += [
                    self._by_hash.pop(sequence_hash) for sequence_hash in array("Q", event.engine)
                ]

    def release_idle(self) -> None:
        """Between steps: free private blocks of preempted and of ended sequences."""
        self._free += self._deferred_free
        self._deferred_free.clear()
        idle = [r for r, t in self._tables.items() if t.sequence.state is SequenceState.WAITING]
        for request in idle:
            self._free += self._tables.pop(request).unregistered

    def block_table(self, sequence: Sequence) -> BlockTable:
        """The block table of a running sequence, extended to its newly allocated blocks."""
        request = sequence.request.id
        table = self._tables.get(request)
        if table is None:
            held = self.block_ids(sequence.sequence_hashes[: sequence.full_blocks])
            table = self._tables[request] = BlockTable(sequence, held)
        front = sequence.private_blocks - sequence.ahead_blocks
        while len(table.block_ids) < sequence.full_blocks + front:
            loaded = table.ahead.pop(len(table.block_ids), None)
            table.block_ids.append(self._free.pop() if loaded is None else loaded)
        return table

    def add_ahead(self, sequence: Sequence, first: int, block_ids: list[int]) -> None:
        """Give a running sequence the block ids of loaded blocks, from block `first` on."""
        ahead = self.block_table(sequence).ahead
        ahead.update(zip(range(first, first + len(block_ids)), block_ids, strict=True))

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Register newly filled blocks by hash; replace duplicates by the registered block."""
        table = self._tables[sequence.request.id]
        for i in range(table.cached, sequence.full_blocks):
            table.block_ids[i] = self.cache_block(sequence.sequence_hashes[i], table.block_ids[i])
        table.cached = sequence.full_blocks

    def release(self, request: str) -> None:
        """Free the private blocks of an ended sequence after the current step."""
        table = self._tables.pop(request, None)
        if table is not None:
            self._deferred_free += table.unregistered

    def allocate(self, count: int) -> list[int]:
        """Block ids for blocks that the block manager has just allocated."""
        return [self._free.pop() for _ in range(count)]

    def return_unused(self, block_ids: list[int]) -> None:
        """Free allocated block ids that were not registered."""
        self._free += block_ids

    def cache_block(self, sequence_hash: int, block_id: int) -> int:
        """Register a block by hash; returns the block id registered under that hash.

        If the hash is registered already, `block_id` is freed.
        """
        known = self._by_hash.setdefault(sequence_hash, block_id)
        if known != block_id:
            self._free.append(block_id)
        return known
