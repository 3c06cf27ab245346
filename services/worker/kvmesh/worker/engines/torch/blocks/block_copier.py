"""Copies blocks between the KV pool of the torch engine and arenas."""

from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from kvmesh._native import xxh3
from kvmesh.worker.adapters.copies.block_copies import Span
from kvmesh.worker.engines.torch.blocks.kv_pool import KvPool

GROUP_BYTES = 4 << 20


class BlockCopier:
    """Copies blocks of `pool` to arenas and back; a second thread computes checksums."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._size = pool.layout.block_bytes
        self._hashing = ThreadPoolExecutor(1, "checksums")

    def close(self) -> None:
        self._hashing.shutdown()

    def offload(
        self, block_ids: Sequence[int], host: Tensor, offsets: Sequence[int]
    ) -> "array[int]":
        """Copy blocks into an arena; returns their checksums."""
        copies, hashing = [], []
        try:
            for group in self._groups(len(block_ids)):
                copies.append(self._pool.begin_copy_out(block_ids[group], host, offsets[group]))
                places, copy = offsets[group], copies[-1]
                hashing.append(self._hashing.submit(self._checksums, host, places, copy))
            return array("Q", [checksum for group in hashing for checksum in group.result()])
        finally:
            _wait_for(copies)

    def onboard(
        self,
        block_ids: Sequence[int],
        host: Tensor,
        offsets: Sequence[int],
        checksums: Sequence[int],
    ) -> int:
        """Fill blocks from an arena; returns their number before the first wrong checksum."""
        copies, hashing = [], []
        try:
            for group in self._groups(len(block_ids)):
                hashing.append(self._hashing.submit(self._checksums, host, offsets[group]))
                copies.append(self._pool.begin_copy_in(block_ids[group], host, offsets[group]))
            found = [checksum for group in hashing for checksum in group.result()]
        finally:
            _wait_for(copies)
        pairs = zip(found, checksums, strict=True)
        return next(
            (i for i, (actual, expected) in enumerate(pairs) if actual != expected), len(found)
        )

    def _groups(self, count: int) -> list[slice]:
        step = max(1, GROUP_BYTES // self._size)
        return [slice(start, start + step) for start in range(0, count, step)]

    def _checksums(
        self, host: Tensor, offsets: Sequence[int], after: Span | None = None
    ) -> list[int]:
        if after is not None:
            after.wait()
        content, size = host.numpy().data, self._size
        return [xxh3(content[offset : offset + size]) for offset in offsets]


def _wait_for(copies: list[Span]) -> None:
    """Wait for copies that were begun: the caller may reuse blocks and rows then."""
    for copy in copies:
        copy.wait()
