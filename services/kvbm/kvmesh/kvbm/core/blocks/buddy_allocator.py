"""A buddy system over equal extents: runs of 2ⁿ of them, each at a multiple of its length."""


class BuddyAllocator:
    """Hands out runs of extents below `limit`, at first all `count`, the lowest that fit first."""

    def __init__(self, count: int) -> None:
        self.limit = count
        self._free: list[set[int]] = [set() for _ in range(max(1, count.bit_length()))]
        self._add(0, count)

    @property
    def orders(self) -> int:
        """Runs of 2ⁿ extents exist for n below this."""
        return self.limit.bit_length()

    def take(self, order: int) -> int | None:
        """The first extent of a run of 2^order, or None if there is none."""
        for larger in range(order, len(self._free)):
            base = min(self._free[larger], default=self.limit)
            if base + (1 << order) <= self.limit:
                self._free[larger].discard(base)
                for split in range(larger - 1, order - 1, -1):
                    self._free[split].add(base + (1 << split))
                return base
        return None

    def take_at(self, base: int, order: int) -> bool:
        """Take the run of 2^order extents that begins at `base`, if it is free."""
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

    def give(self, base: int, order: int) -> None:
        """Return a run; it joins its free neighbours."""
        while order + 1 < len(self._free):
            buddy = base ^ (1 << order)
            if buddy not in self._free[order]:
                break
            self._free[order].discard(buddy)
            base = min(base, buddy)
            order += 1
        self._free[order].add(base)

    def _add(self, base: int, end: int) -> None:
        """Make the extents from `base` to `end` free, in runs as long as they can be."""
        while base < end:
            order = min((end - base).bit_length() - 1, _alignment(base, end))
            self._free[order].add(base)
            base += 1 << order


def _alignment(base: int, count: int) -> int:
    return (base & -base).bit_length() - 1 if base else count.bit_length()
