"""Memory for chunks on their way: read, verified, and only then copied into the store."""

import mmap


class Staging:
    """Buffers for one chunk each; the one used last comes first, since the CPU's cache holds it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """A buffer as large as the largest chunk."""
        return self._free.pop() if self._free else memoryview(mmap.mmap(-1, self._size))

    def give(self, buffer: memoryview) -> None:
        """Return a buffer into which nothing writes any more."""
        self._free.append(buffer)
