"""The arenas of a node as tensors, page-locked if a GPU copies from and to them."""

import asyncio
import logging
from pathlib import Path

import torch
from torch import Tensor

from kvmesh.blocks.arena import ArenaView

log = logging.getLogger(__name__)
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices of the process


class ArenaTensors:
    """Tensors over the arenas that are mapped now, one per file however often it is mapped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[Path, Tensor] = {}
        self._users: dict[Path, int] = {}
        self._changing = asyncio.Lock()

    async def adopt(self, arena: ArenaView) -> None:
        path = arena.path
        async with self._changing:
            if path not in self._tensors:
                tensor = torch.frombuffer(arena.view(0, arena.size), dtype=torch.uint8)
                if self._device.type == "cuda":
                    await asyncio.to_thread(_page_lock, tensor, path, self._device)
                self._tensors[path] = tensor
            self._users[path] = self._users.get(path, 0) + 1

    async def release(self, arena: ArenaView) -> None:
        path = arena.path
        async with self._changing:
            self._users[path] -= 1
            if not self._users[path]:
                del self._users[path]
                tensor = self._tensors.pop(path)
                if self._device.type == "cuda":
                    await asyncio.to_thread(_page_unlock, tensor, self._device)

    def of(self, arena: ArenaView) -> Tensor:
        """All bytes of an arena that has been adopted and not been released."""
        return self._tensors[arena.path]

    def named(self, name: str) -> Tensor | None:
        """All bytes of the arena whose file has this name; None if it is not adopted."""
        tensors = list(self._tensors.items())
        return next((tensor for path, tensor in tensors if path.name == name), None)


def _page_lock(tensor: Tensor, path: Path, device: torch.device) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        status = cudart.cudaHostRegister(tensor.data_ptr(), tensor.numel(), PORTABLE)
    if int(status) != 0:
        log.warning("cannot page-lock %s (CUDA error %d): copies are slow", path, status)


def _page_unlock(tensor: Tensor, device: torch.device) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # copies that were begun may still read or write these pages
        cudart.cudaHostUnregister(tensor.data_ptr())
