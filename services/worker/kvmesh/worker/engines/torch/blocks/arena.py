"""A node's arena as tensors, page-locked where a GPU copies from and to it."""

import asyncio
import logging
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from kvmesh._native import xxh3
from kvmesh.blocks.arena import ArenaView
from kvmesh.worker.engines.torch.blocks.kv_pool import KvPool

log = logging.getLogger(__name__)
GROUP_BYTES = 4 << 20


class ArenaTensors:
    """Tensors over the arenas that are mapped now."""

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._tensors: dict[ArenaView, Tensor] = {}

    async def adopt(self, arena: ArenaView) -> None:
        tensor = torch.frombuffer(arena.view(0, arena.size), dtype=torch.uint8)
        if self._pins:
            await asyncio.to_thread(_pin, tensor, arena)
        self._tensors[arena] = tensor

    async def release(self, arena: ArenaView) -> None:
        tensor = self._tensors.pop(arena)
        if self._pins:
            await asyncio.to_thread(_unpin, tensor)

    def of(self, arena: ArenaView) -> Tensor:
        """All bytes of an arena that has been adopted and not been released."""
        return self._tensors[arena]

    def named(self, name: str) -> Tensor | None:
        """The same for the arena whose file has this name, if it has been adopted."""
        tensors = list(self._tensors.items())
        return next((tensor for arena, tensor in tensors if arena.path.name == name), None)


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


def _pin(tensor: Tensor, arena: ArenaView) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(status) != 0:
        log.warning("cannot page-lock %s (CUDA error %d): copies are slow", arena.path, status)


def _unpin(tensor: Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(tensor.data_ptr())
