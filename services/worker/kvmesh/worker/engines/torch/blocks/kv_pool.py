"""KV memory of the torch engine: one row of bytes per block, in the layout of all tiers.

A row holds keys, then values, layer by layer, each as [block_size, heads, size]; blocks are copied
to other memory as a whole.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmesh.bus.messages import KvLayout
from kvmesh.worker.adapters.copies.block_copies import BlockCopies, Span
from kvmesh.worker.adapters.copies.cuda_copies import CudaBlockCopies
from kvmesh.worker.adapters.copies.host_copies import HostSpan

LANE_BYTES = 16 << 20


class KvPool:
    """A pool of `blocks` blocks on `device`, initially zero so that unwritten KV is finite.

    Copies may run in other threads than the model, on blocks that it does not use meanwhile. They
    do not wait for its stream: whoever computes a block waits for the end before it is copied.
    """

    def __init__(self, layout: KvLayout, blocks: int, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.blocks = blocks
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
        self._copies: BlockCopies | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copies = CudaBlockCopies(device, max(LANE_BYTES, layout.block_bytes))

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
        self.begin_copy_out(blocks, host, offsets).wait()

    def copy_in(self, blocks: Sequence[int], host: Tensor, offsets: Sequence[int]) -> None:
        """Fill blocks from these offsets of `host`; synchronous."""
        self.begin_copy_in(blocks, host, offsets).wait()

    def begin_copy_out(self, blocks: Sequence[int], host: Tensor, offsets: Sequence[int]) -> Span:
        """Begin to copy blocks out; the result can be waited for."""
        if self._copies is None:
            rows, content, size = self._rows.numpy(), host.numpy(), self.layout.block_bytes
            for block, offset in zip(blocks, offsets, strict=True):
                content[offset : offset + size] = rows[block]
            return HostSpan(0.0)
        with torch.cuda.stream(self._stream):
            return self._copies.gather([self._rows], blocks, host, offsets)

    def begin_copy_in(self, blocks: Sequence[int], host: Tensor, offsets: Sequence[int]) -> Span:
        """Begin to fill blocks; the result can be waited for."""
        if self._copies is None:
            rows, content, size = self._rows.numpy(), host.numpy(), self.layout.block_bytes
            for block, offset in zip(blocks, offsets, strict=True):
                rows[block] = content[offset : offset + size]
            return HostSpan(0.0)
        return self._copies.fill([self._rows], blocks, host, offsets)
