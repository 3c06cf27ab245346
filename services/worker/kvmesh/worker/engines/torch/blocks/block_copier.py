"""Copies blocks between the pool of the torch engine and arenas."""

from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from kvmesh._native import xxh3
from kvmesh.worker.engines.torch.blocks.kv_pool import KvPool

GROUP_BYTES = 4 << 20


class BlockCopier:
    """Copies blocks of `pool` to arenas and back; their checksums are taken in a second thread."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._size = pool.layout.block_bytes
        self._hashing = ThreadPoolExecutor(1, "checksums")

    def close(self) -> None:
        self._hashing.shutdown()

    def down(self, places: Sequence[int], host: Tensor, offsets: Sequence[int]) -> "array[int]":
        """Copy blocks into an arena; returns their checksums."""
        hashing = []
        for part in self._groups(len(places)):
            self._pool.copy_out(places[part], host, offsets[part])
            hashing.append(self._hashing.submit(self._checksums, host, offsets[part]))
        return array("Q", [checksum for group in hashing for checksum in group.result()])

    def up(
        self,
        places: Sequence[int],
        host: Tensor,
        offsets: Sequence[int],
        checksums: Sequence[int],
    ) -> int:
        """Fill blocks from an arena; returns how many there are before the first wrong one."""
        hashing = []
        for part in self._groups(len(places)):
            hashing.append(self._hashing.submit(self._checksums, host, offsets[part]))
            self._pool.copy_in(places[part], host, offsets[part])
        found = [checksum for group in hashing for checksum in group.result()]
        pairs = zip(found, checksums, strict=True)
        return next((i for i, (is_, should) in enumerate(pairs) if is_ != should), len(found))

    def _groups(self, count: int) -> list[slice]:
        step = max(1, GROUP_BYTES // self._size)
        return [slice(start, start + step) for start in range(0, count, step)]

    def _checksums(self, host: Tensor, offsets: Sequence[int]) -> list[int]:
        content, size = host.numpy().data, self._size
        return [xxh3(content[offset : offset + size]) for offset in offsets]
