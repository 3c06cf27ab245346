"""Slab allocator: slots for blocks of several layouts in one tier.

The tier is divided into slabs, each with slots of one size. A slab whose last slot is freed is
available to all layouts; when a layout finds no free slot, `window` lists the slots to free for a
new slab.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvmesh.kvbm.core.blocks.buddy_allocator import BuddyAllocator
from kvmesh.kvbm.core.errors import TooSmall

PAGE = 4096
MIN_EXTENT = 64 << 10
MAX_EXTENT = 16 << 20
MAX_WASTE = 1 / 16
LARGER_SLABS = 5
LEAST_EXTENTS, MAX_EXTENTS = 16, 1 << 20


def slot_bytes(block_bytes: int) -> int:
    """Bytes of a block's slot: whole pages, as direct I/O requires."""
    return -(-block_bytes // PAGE) * PAGE


@dataclass(slots=True, eq=False)
class Slab:
    """A run of extents with slots of one size."""

    base: int
    order: int
    size: int
    free: list[int]
    live: set[int] = field(default_factory=set)


class SlabAllocator:
    """Slots in `capacity` bytes, identified by their page-aligned offsets."""

    def __init__(self, capacity: int, extent: int = 0) -> None:
        self.capacity = capacity
        share = 1 << max(0, (capacity >> 10).bit_length() - 1)
        self.extent = extent or min(MAX_EXTENT, max(MIN_EXTENT, share))
        self._extents = BuddyAllocator(capacity // self.extent)
        self._slabs: dict[int, Slab] = {}
        self._open: dict[int, dict[int, Slab]] = {}
        self.used = 0

    def supports_extent(self, extent: int) -> bool:
        """True if the capacity can be divided into extents of `extent` bytes."""
        return LEAST_EXTENTS <= self.capacity // extent <= MAX_EXTENTS

    @property
    def end(self) -> int:
        """End of the last slab in use."""
        return self.extent * max((_end(slab) for slab in self._slabs.values()), default=0)

    def resize(self, capacity: int) -> set[int]:
        """Allocate from the first `capacity` bytes only; at most the initial capacity.

        Returns the slots in use beyond it.
        """
        self.capacity = capacity
        self._extents.limit = capacity // self.extent
        slabs = {slab.base: slab for slab in self._slabs.values()}
        self._open.clear()
        for slab in slabs.values():
            if slab.free and not self._is_beyond(slab):
                self._open.setdefault(slab.size, {})[slab.base] = slab
        return {slot for slab in slabs.values() if self._is_beyond(slab) for slot in slab.live}

    def _is_beyond(self, slab: Slab) -> bool:
        return _end(slab) > self._extents.limit

    def order(self, size: int) -> int:
        """Order of the slabs for slots of `size` bytes: 2^order extents. Raises TooSmall."""
        orders = range(self._extents.orders)
        fitting = [order for order in orders if self.extent << order >= size][:LARGER_SLABS]
        if not fitting:
            raise TooSmall(size, self.capacity)
        wastes = [(self.extent << order) % size / (self.extent << order) for order in fitting]
        economical = (order for order, w in zip(fitting, wastes, strict=True) if w <= MAX_WASTE)
        return next(economical, fitting[wastes.index(min(wastes))])

    def allocate(self, size: int) -> int | None:
        """A free slot of `size` bytes, or None."""
        candidates = self._open.setdefault(size, {})
        if not candidates and self._add_slab(size) is None:
            return None
        slab = next(iter(candidates.values()))
        offset = slab.free.pop()
        self._occupy(slab, offset)
        return offset

    def allocate_at(self, size: int, offset: int) -> bool:
        """Allocate the slot at `offset`, as before a restart; False if it is unavailable."""
        slab = self._slabs.get(offset // self.extent) or self._restore_slab(size, offset)
        if slab is None or slab.size != size or offset not in slab.free:
            return False
        slab.free.remove(offset)
        self._occupy(slab, offset)
        return True

    def free(self, offset: int) -> None:
        """Free the slot at `offset`."""
        slab = self._slabs[offset // self.extent]
        slab.live.discard(offset)
        slab.free.append(offset)
        self.used -= slab.size
        candidates = self._open.setdefault(slab.size, {})
        if slab.live:
            if not self._is_beyond(slab):
                candidates[slab.base] = slab
            return
        candidates.pop(slab.base, None)
        for extent in range(slab.base, slab.base + (1 << slab.order)):
            del self._slabs[extent]
        self._extents.free(slab.base, slab.order)

    def window(self, size: int, offset: int) -> set[int]:
        """The slots in use around `offset` that a new slab with slots of `size` would replace."""
        length = 1 << self.order(size)
        first = offset // self.extent // length * length
        slabs = (self._slabs.get(extent) for extent in range(first, first + length))
        return {slot for slab in slabs if slab is not None for slot in slab.live}

    def windows(self, size: int) -> Iterator[set[int]]:
        """The slots in use of each aligned window that could hold a new slab."""
        length = 1 << self.order(size)
        for first in range(0, self._extents.limit - length + 1, length):
            yield self.window(size, first * self.extent)

    def _occupy(self, slab: Slab, offset: int) -> None:
        slab.live.add(offset)
        if not slab.free:
            self._open.get(slab.size, {}).pop(slab.base, None)
        self.used += slab.size

    def _add_slab(self, size: int) -> Slab | None:
        order = self.order(size)
        base = self._extents.allocate(order)
        return None if base is None else self._open_slab(base, order, size)

    def _restore_slab(self, size: int, offset: int) -> Slab | None:
        order = self.order(size)
        base = offset // self.extent >> order << order
        return (
            self._open_slab(base, order, size) if self._extents.allocate_at(base, order) else None
        )

    def _open_slab(self, base: int, order: int, size: int) -> Slab:
        start, length = base * self.extent, self.extent << order
        offsets = range(start, start + length - size + 1, size)
        slab = Slab(base, order, size, list(reversed(offsets)))
        for extent in range(base, base + (1 << order)):
            self._slabs[extent] = slab
        self._open.setdefault(size, {})[base] = slab
        return slab


def _end(slab: Slab) -> int:
    return slab.base + (1 << slab.order)
