"""Which physical block holds what: the memory side of the block manager's books.

The block manager counts blocks and knows them by hash; here each gets a place. Both see the same
signals in the same order, so there is always a free place for what the manager has allocated.
"""

from array import array
from collections.abc import Iterable

from kvmesh.bus.messages import KvEvent, Removed
from kvmesh.worker.enginecore.sequence import Sequence, SequenceState


class BlockTable:
    """The places of one sequence's blocks, in order; the first `named` are known by their hash."""

    __slots__ = ("named", "places", "sequence")

    def __init__(self, sequence: Sequence, places: list[int]) -> None:
        self.sequence = sequence
        self.places = places
        self.named = len(places)


class SlotTable:
    """Places 0 … `blocks` - 1: each is free, in the name of one sequence, or has a hash."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, -1, -1))
        self._leaving: list[int] = []
        self._places: dict[int, int] = {}
        self._tables: dict[str, BlockTable] = {}

    @property
    def contents(self) -> set[int]:
        """The hashes of all blocks that have one."""
        return set(self._places)

    @property
    def free(self) -> int:
        """How many places hold nothing that is needed."""
        return len(self._free) + len(self._leaving)

    @property
    def ready(self) -> int:
        """How many places can be taken at once, even while a step is under way."""
        return len(self._free)

    def places(self, hashes: Iterable[int]) -> list[int]:
        """Where full blocks are; KeyError names one that is not held."""
        return [self._places[block] for block in hashes]

    def follow(self, events: Iterable[KvEvent]) -> None:
        """Free the places of evicted blocks."""
        for event in events:
            if isinstance(event, Removed):
                self._free += [self._places.pop(block) for block in array("Q", event.engine)]

    def release_idle(self) -> None:
        """Between steps: take back what preempted sequences had, and what others have left."""
        self._free += self._leaving
        self._leaving.clear()
        idle = [r for r, t in self._tables.items() if t.sequence.state is SequenceState.WAITING]
        for request in idle:
            self._free += self._tables[request].places[self._tables.pop(request).named :]

    def table(self, sequence: Sequence) -> BlockTable:
        """The places of all that a running sequence holds, new private blocks included."""
        request = sequence.request.id
        table = self._tables.get(request)
        if table is None:
            held = self.places(sequence.sequence_hashes[: sequence.full_blocks])
            table = self._tables[request] = BlockTable(sequence, held)
        while len(table.places) < sequence.full_blocks + sequence.private_blocks:
            table.places.append(self._free.pop())
        return table

    def name(self, sequence: Sequence) -> None:
        """Know newly filled blocks by their hashes; what is held already is shared instead."""
        table = self._tables[sequence.request.id]
        for i in range(table.named, sequence.full_blocks):
            table.places[i] = self.keep(sequence.sequence_hashes[i], table.places[i])
        table.named = sequence.full_blocks

    def release(self, request: str) -> None:
        """Free the private blocks of a sequence that ends, once no step writes to them."""
        table = self._tables.pop(request, None)
        if table is not None:
            self._leaving += table.places[table.named :]

    def take(self, count: int) -> list[int]:
        """Places for blocks that the manager has just allocated."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, places: list[int]) -> None:
        """Free places that were taken and have got no hash."""
        self._free += places

    def keep(self, block: int, place: int) -> int:
        """Give the block at `place` its hash; returns where the block with that hash is."""
        known = self._places.setdefault(block, place)
        if known != place:
            self._free.append(place)
        return known
