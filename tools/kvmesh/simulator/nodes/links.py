"""Links between memories: transfers queue behind each other."""


class VirtualLink:
    """One direction of a link, or a disk, of `bytes_per_s`; `moved` counts bytes."""

    def __init__(self, bytes_per_s: float) -> None:
        self.moved = 0
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def reserve(self, now: float, size: int) -> float:
        """The time at which a transfer of `size` bytes, requested at `now`, ends."""
        self.moved += size
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        return self._free_at
