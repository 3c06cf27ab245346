"""Buddy allocator over equal extents: runs of 2ⁿ extents, each aligned to its length."""


class BuddyAllocator:
    """Allocates the lowest fitting run of extents below `limit`, which starts as `count`."""

    def __init__(self, count: int) -> None:
        self.limit = count
        self._free: list[set[int]] = [set() for _ in range(max(1, count.bit_length()))]
        self._add(0, count)

    @property
    def orders(self) -> int:
        """Number of run lengths: runs of 2ⁿ extents exist for n below it."""
        return self.limit.bit_length()

    def allocate(self, order: int) -> int | None:
        """The first extent of a free run of 2^order, or None."""
        for larger in range(order, len(self._free)):
            base = min(self._free[larger], default=self.limit)
            if base + (1 << order) <= self.limit:
                self._free[larger].discard(base)
                for split in range(larger - 1, order - 1, -1):
                    self._free[split].add(base + (1 << split))
                return base
        return None

    def allocate_at(self, base: int, order: int) -> bool:
        """Allocate the run of 2^order extents at `base`; False if it is not free."""
        if base + (1 << order) > self.limit:
            return False
        for larger in range(order, len(self._free)):
            start = base >> larger << larger
            if start in self._free[larger]:
                self._free[larger].discard(start)
                for split in range(larger - 1, order - 1, -1):
                    half = 1 << split
                    self._free[split].add(start if base >= start + half else start + half)
                    start += half if base >= start + half else 0
                return True
        return False

    def free(self, base: int, order: int) -> None:
        """Free a run and merge it with its free buddies."""
        while order + 1 < len(self._free):
            buddy = base ^ (1 << order)
            if buddy not in self._free[order]:
                break
            self._free[order].discard(buddy)
            base = min(base, buddy)
            order += 1
        self._free[order].add(base)

    def _add(self, base: int, end: int) -> None:
        """Add the extents from `base` to `end` as the longest aligned runs."""
        while base < end:
            order = min((end - base).bit_length() - 1, _alignment(base, end))
            self._free[order].add(base)
            base += 1 << order


def _alignment(base: int, count: int) -> int:
    return (base & -base).bit_length() - 1 if base else count.bit_length()
