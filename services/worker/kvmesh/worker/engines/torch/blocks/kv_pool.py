"""KV memory of the torch engine: one row of bytes per block, in the layout of all tiers.

A row holds keys, then values, layer by layer, each as [block_size, heads, size]; blocks are copied
to other memory as a whole.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvmesh.bus.messages import KvLayout


class KvPool:
    """A pool of `blocks` blocks on `device`, initially zero so that unwritten KV is finite.

    Copies may run in another thread than the model, on blocks that it does not use meanwhile.
    """

    def __init__(self, layout: KvLayout, blocks: int, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.blocks = blocks
        self._device = device
        self._rows = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=device)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        start, values = 0, self._rows.view(dtype)
        for layer in layout.layers:
            for size, tensors in ((layer.key_size, self._keys), (layer.value_size, self._values)):
                count = layout.block_size * layer.heads * size
                part = values[:, start : start + count]
                tensors.append(part.view(blocks, layout.block_size, layer.heads, size))
                start += count
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def write(self, layer: int, slots: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """Store KV [tokens, heads, size] at `slots`: block ids, and offsets in the blocks."""
        self._keys[layer].index_put_(slots, key)
        self._values[layer].index_put_(slots, value)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, heads, tokens, size] of block tables [rows, blocks]."""
        keys, values = self._keys[layer][tables], self._values[layer][tables]
        return keys.flatten(1, 2).transpose(1, 2), values.flatten(1, 2).transpose(1, 2)

    def save(self, blocks: Sequence[int]) -> list[bytes]:
        """Copy the content of blocks."""
        size = self.layout.block_bytes
        host = torch.empty(len(blocks) * size, dtype=torch.uint8)
        self.copy_out(blocks, host, range(0, len(host), size))
        return [row.numpy().tobytes() for row in host.view(len(blocks), size)]

    def load(self, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Fill blocks with content from `save`."""
        if blocks:
            host = torch.frombuffer(bytearray().join(data), dtype=torch.uint8)
            self.copy_in(blocks, host, range(0, len(host), self.layout.block_bytes))

    def copy_out(self, blocks: Sequence[int], host: Tensor, offsets: Sequence[int]) -> None:
        """Copy blocks to these offsets of `host`, a tensor of bytes; synchronous."""
        if self._stream is None:
            rows, content, size = self._rows.numpy(), host.numpy(), self.layout.block_bytes
            for block, offset in zip(blocks, offsets, strict=True):
                content[offset : offset + size] = rows[block]
            return
        with torch.cuda.stream(self._stream):
            for run in self._runs(blocks, offsets):
                host[run.start : run.end].copy_(self._rows[run.blocks].view(-1), non_blocking=True)
        self._stream.synchronize()

    def copy_in(self, blocks: Sequence[int], host: Tensor, offsets: Sequence[int]) -> None:
        """Fill blocks from these offsets of `host`; synchronous."""
        if self._stream is None:
            rows, content, size = self._rows.numpy(), host.numpy(), self.layout.block_bytes
            for block, offset in zip(blocks, offsets, strict=True):
                rows[block] = content[offset : offset + size]
            return
        with torch.cuda.stream(self._stream):
            for run in self._runs(blocks, offsets):
                arrived = host[run.start : run.end].to(self._device, non_blocking=True)
                self._rows.index_copy_(0, run.blocks, arrived.view(-1, self.layout.block_bytes))
        self._stream.synchronize()

    def _runs(self, blocks: Sequence[int], offsets: Sequence[int]) -> Iterator["_Run"]:
        """Group blocks that are contiguous on the host."""
        size, first = self.layout.block_bytes, 0
        for i in range(1, len(blocks) + 1):
            if i == len(blocks) or offsets[i] != offsets[i - 1] + size:
                index = torch.tensor(blocks[first:i], device=self._device)
                yield _Run(index, offsets[first], offsets[i - 1] + size)
                first = i


class _Run(NamedTuple):
    """Blocks, and their bytes `start` to `end` of host memory."""

    blocks: Tensor
    start: int
    end: int
