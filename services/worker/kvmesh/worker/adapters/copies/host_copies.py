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

CHUNK_BYTES = 16 << 20


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
                index = torch.tensor(chunk.blocks, device=self._device)
                for run in chunk.runs:
                    rows = bytes_of(host, run, size).to(self._device).view(-1, size)
                    scatter(tensors, index[run.first : run.end], rows)
        return self._copied(began)

    def gather(
        self, tensors: Sequence[Tensor], blocks: Sequence[int], host: Tensor, offsets: Sequence[int]
    ) -> Span:
        began, size = time.perf_counter(), row_bytes(tensors)
        with torch.inference_mode():
            for chunk in chunks(blocks, offsets, size, max(1, CHUNK_BYTES // size)):
                index = torch.tensor(chunk.blocks, device=self._device)
                for run in chunk.runs:
                    rows = bytes_of(host, run, size).view(-1, size)
                    collect(tensors, index[run.first : run.end], rows)
        return self._copied(began)

    def _copied(self, began: float) -> Span:
        seconds = time.perf_counter() - began
        self._began += seconds  # a copy is no part of the engine's step
        return HostSpan(seconds)
