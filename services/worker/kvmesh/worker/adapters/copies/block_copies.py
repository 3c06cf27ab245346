"""Copies of KV blocks between an engine's tensors and rows of host memory.

A row has the bytes of one block in each of several tensors, one after the other. A tensor is
[blocks, ...] with any strides.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Span(Protocol):
    """Work of a device from one point in its order to another."""

    @property
    def ended(self) -> bool: ...

    @property
    def seconds(self) -> float:
        """Duration of ended work."""
        ...

    def wait(self) -> None:
        """Block this thread until the work has ended."""
        ...


class BlockCopies(Protocol):
    """Copies in the order of an engine's steps."""

    def begin_step(self) -> None:
        """Let later copies into blocks wait for all that the engine has begun so far."""
        ...

    def end_step(self) -> Span:
        """The engine's work since `begin_step`, without copies."""
        ...

    def fill(
        self, tensors: Sequence[Tensor], blocks: Sequence[int], host: Tensor, offsets: Sequence[int]
    ) -> Span:
        """Fill blocks with the rows at these offsets of `host`, a tensor of bytes.

        Nothing else may use the blocks, or change the rows, until the copy has ended.
        """
        ...

    def gather(
        self, tensors: Sequence[Tensor], blocks: Sequence[int], host: Tensor, offsets: Sequence[int]
    ) -> Span:
        """Copy blocks to rows at these offsets of `host`.

        The rows have what the engine's computation up to now leaves in the blocks, whatever it
        writes there later.
        """
        ...


class RowRun(NamedTuple):
    """The rows `first` to before `end` of a chunk, which are contiguous from `offset` on."""

    first: int
    end: int
    offset: int


class CopyChunk(NamedTuple):
    """Blocks that are copied at a time, and where their rows are, in contiguous runs."""

    blocks: list[int]
    runs: list[RowRun]


def row_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of one block in all the tensors."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)


def chunks(
    blocks: Sequence[int], offsets: Sequence[int], size: int, most: int
) -> Iterator[CopyChunk]:
    """Divide blocks into chunks of at most `most`, in order; rows have `size` bytes.

    Raises ValueError unless each block has an offset.
    """
    if len(blocks) != len(offsets):
        raise ValueError(f"{len(blocks)} blocks have {len(offsets)} rows")
    for start in range(0, len(blocks), most):
        places = offsets[start : start + most]
        cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + size]
        runs = [
            RowRun(first, end, places[first])
            for first, end in zip([0, *cuts], [*cuts, len(places)], strict=True)
        ]
        yield CopyChunk(list(blocks[start : start + most]), runs)


def scatter(tensors: Sequence[Tensor], index: Tensor, rows: Tensor) -> None:
    """Fill the blocks `index` of all tensors from rows [blocks, bytes]."""
    start = 0
    for tensor in tensors:
        size = tensor[0].numel() * tensor.element_size()
        part, item = rows[:, start : start + size], tensor.element_size()
        if part.storage_offset() % item or part.stride(0) % item:
            part = part.clone(memory_format=torch.contiguous_format)  # a view must be aligned
        tensor[index] = part.view(tensor.dtype).view(len(index), *tensor.shape[1:])
        start += size


def collect(tensors: Sequence[Tensor], index: Tensor, rows: Tensor) -> None:
    """Copy the blocks `index` of all tensors to rows [blocks, bytes]."""
    start = 0
    for tensor in tensors:
        values = tensor[index].reshape(len(index), -1).contiguous().view(torch.uint8)
        rows[:, start : start + values.shape[1]].copy_(values)
        start += values.shape[1]


def bytes_of(host: Tensor, run: RowRun, size: int) -> Tensor:
    """The bytes of a run, of rows with `size` bytes."""
    return host[run.offset : run.offset + (run.end - run.first) * size]
