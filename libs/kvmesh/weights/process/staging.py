"""Memory for chunks on their way: read, verified, and only then copied into the store."""

import logging
import mmap

from kvmesh.transfer import Region, Transport

log = logging.getLogger(__name__)

MOST_LOST = 4  # buffers into which transfers may still write; more mean that NIXL is not sound here


class ChunkBuffers:
    """Buffers for one chunk each; the one used last comes first, since the CPU's cache holds it.

    NIXL reads into them if `transport` has it.
    """

    def __init__(self, size: int, transport: Transport | None = None) -> None:
        self._size = size
        self._transport = transport
        self._free: list[memoryview] = []
        self._regions: dict[mmap.mmap, Region] = {}
        self._lost: set[mmap.mmap] = set()
        self.direct_bytes = 0  # read through NIXL

    @property
    def transport(self) -> Transport | None:
        """For reads through NIXL, if they are possible."""
        transport = self._transport
        if transport is None or not transport.direct or len(self._lost) > MOST_LOST:
            return None
        return transport

    def take(self) -> memoryview:
        """A buffer as large as the largest chunk."""
        return self._free.pop() if self._free else memoryview(mmap.mmap(-1, self._size))

    def give(self, buffer: memoryview) -> None:
        """Return a buffer into which nothing writes any more."""
        self._free.append(buffer)

    def lose(self, buffer: memoryview) -> None:
        """Leave a buffer, into which NIXL may still write, for ever."""
        self._lost.add(_memory(buffer))
        if len(self._lost) == MOST_LOST + 1:
            log.warning(
                "these weights come over TCP: %d transfers by NIXL do not end", MOST_LOST + 1
            )

    def region(self, buffer: memoryview) -> Region:
        """The registered memory that begins with `buffer`; raises TransferError."""
        memory = _memory(buffer)
        if memory not in self._regions:
            assert self._transport is not None
            self._regions[memory] = self._transport.register(memory)
        return self._regions[memory]

    def close(self) -> None:
        """Release the buffers; those that are lost stay registered until the process ends."""
        for memory, region in self._regions.items():
            if memory not in self._lost:
                region.close()
        self._regions.clear()
        self._free.clear()


def _memory(buffer: memoryview) -> mmap.mmap:
    memory = buffer.obj
    assert isinstance(memory, mmap.mmap)
    return memory
