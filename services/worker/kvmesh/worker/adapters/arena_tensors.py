"""The arenas of a node as tensors, page-locked if a GPU copies from and to them."""

import asyncio
import logging

import torch
from torch import Tensor

from kvmesh.blocks.arena import ArenaView

log = logging.getLogger(__name__)


class ArenaTensors:
    """Tensors over the arenas that are mapped now."""

    def __init__(self, device: torch.device) -> None:
        self._page_locks = device.type == "cuda"
        self._tensors: dict[ArenaView, Tensor] = {}

    async def adopt(self, arena: ArenaView) -> None:
        tensor = torch.frombuffer(arena.view(0, arena.size), dtype=torch.uint8)
        if self._page_locks:
            await asyncio.to_thread(_page_lock, tensor, arena)
        self._tensors[arena] = tensor

    async def release(self, arena: ArenaView) -> None:
        tensor = self._tensors.pop(arena)
        if self._page_locks:
            await asyncio.to_thread(_page_unlock, tensor)

    def of(self, arena: ArenaView) -> Tensor:
        """All bytes of an arena that has been adopted and not been released."""
        return self._tensors[arena]

    def named(self, name: str) -> Tensor | None:
        """All bytes of the arena whose file has this name; None if it is not adopted."""
        tensors = list(self._tensors.items())
        return next((tensor for arena, tensor in tensors if arena.path.name == name), None)


def _page_lock(tensor: Tensor, arena: ArenaView) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(status) != 0:
        log.warning("cannot page-lock %s (CUDA error %d): copies are slow", arena.path, status)


def _page_unlock(tensor: Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(tensor.data_ptr())
