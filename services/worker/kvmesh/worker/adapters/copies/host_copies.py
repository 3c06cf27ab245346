"""Copies of KV blocks of an engine without streams: each has ended when the call returns."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvmesh.worker.adapters.copies.block_copies import (
    Span,
    bytes_of,
    chunks,
    collect,
    row_bytes,
    scatter,
)

CHUNK_BYTES = 4 << 20


class HostSpan:
    """Work that has ended."""

    ended = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        pass


class HostBlockCopies:
    """Implements BlockCopies for tensors on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self) -> Span:
        return HostSpan(time.perf_counter() - self._began)

    def fill(
        self, tensors: Sequence[Tensor], blocks: Sequence[int], host: Tensor, offsets: Sequence[int]
    ) -> Span:
        began, size = time.perf_counter(), row_bytes(tensors)
        with torch.inference_mode():
            for chunk in chunks(blocks, offsets, size, max(1, CHUNK_BYTES // size)):
                runs = [bytes_of(host, run, size) for run in chunk.runs]
                rows = (runs[0] if len(runs) == 1 else torch.cat(runs)).to(self._device)
                index = torch.tensor(chunk.blocks, device=self._device)
                scatter(tensors, index, rows.view(-1, size))
        return self._copied(began)

    def gather(
        self, tensors: Sequence[Tensor], blocks: Sequence[int], host: Tensor, offsets: Sequence[int]
    ) -> Span:
        began, size = time.perf_counter(), row_bytes(tensors)
        with torch.inference_mode():
            for chunk in chunks(blocks, offsets, size, max(1, CHUNK_BYTES // size)):
                index = torch.tensor(chunk.blocks, device=self._device)
                if len(chunk.runs) == 1:
                    rows = bytes_of(host, chunk.runs[0], size).view(-1, size)
                    collect(tensors, index, rows)
                    continue
                rows = host.new_empty(len(chunk.blocks), size)
                collect(tensors, index, rows)
                for run in chunk.runs:
                    bytes_of(host, run, size).copy_(rows[run.first : run.end].view(-1))
        return self._copied(began)

    def _copied(self, began: float) -> Span:
        seconds = time.perf_counter() - began
        self._began += seconds  # a copy is no part of the engine's step
        return HostSpan(seconds)
