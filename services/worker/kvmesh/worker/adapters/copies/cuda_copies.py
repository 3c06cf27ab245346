"""Copies of KV blocks of an engine on a GPU, on streams of their own.

A copy passes through device memory of a *lane*: one transfer per run of rows between host and
lane, one kernel per tensor between lane and blocks. Lanes take turns, so a transfer of one runs
beside the kernels of the other. Host memory should be page-locked; else its transfers block.
"""

import threading
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from kvmesh.worker.adapters.copies.block_copies import (
    CopyChunk,
    Span,
    bytes_of,
    chunks,
    collect,
    row_bytes,
    scatter,
)
from kvmesh.worker.adapters.copies.host_copies import HostSpan

LANES = 2


class StreamSpan:
    """Work between an event and later ones, the last of which end it."""

    def __init__(
        self, device: torch.device, began: torch.cuda.Event, ends: list[torch.cuda.Event]
    ) -> None:
        self._device = device
        self._began = began
        self._ends = ends

    @property
    def ended(self) -> bool:
        # a thread without a device would create a context on the first one
        with torch.cuda.device(self._device):
            return all(bool(event.query()) for event in self._ends)  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        with torch.cuda.device(self._device):
            return max(float(self._began.elapsed_time(event)) for event in self._ends) / 1e3

    def wait(self) -> None:
        with torch.cuda.device(self._device):
            for event in self._ends:
                event.synchronize()


class _Lane:
    """A stream, device memory for its copies, and the end of its last copy to the host."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.free: torch.cuda.Event | None = None


class CudaBlockCopies:
    """Implements BlockCopies for tensors on a GPU; `lane_bytes` are at least a row.

    The engine's computation is what the current stream of the calling thread has been given.
    Methods may be called in several threads.
    """

    def __init__(self, device: torch.device, lane_bytes: int) -> None:
        self._device = device
        self._lane_bytes = lane_bytes
        fills = [_Lane(device, lane_bytes) for _ in range(LANES)]
        gathers = [_Lane(device, lane_bytes) for _ in range(LANES)]
        # what had the lanes' memory before may still be in use on the stream that freed it
        torch.cuda.current_stream(device).synchronize()
        self._fills, self._gathers = cycle(fills), cycle(gathers)
        self._lock = threading.Lock()
        self._began: torch.cuda.Event | None = None

    def begin_step(self) -> None:
        self._began = self._record(torch.cuda.current_stream(self._device))

    def end_step(self) -> Span:
        end = self._record(torch.cuda.current_stream(self._device))
        return StreamSpan(self._device, self._began or end, [end])

    def fill(
        self, tensors: Sequence[Tensor], blocks: Sequence[int], host: Tensor, offsets: Sequence[int]
    ) -> Span:
        began: torch.cuda.Event | None = None
        ends: dict[_Lane, torch.cuda.Event] = {}
        size = row_bytes(tensors)
        with self._lock, torch.inference_mode():
            for chunk in self._chunks(blocks, offsets, size):
                lane = next(self._fills)
                with torch.cuda.stream(lane.stream):
                    if self._began is not None:
                        lane.stream.wait_event(self._began)
                    began = began or self._record(lane.stream)
                    rows = lane.memory[: len(chunk.blocks) * size]
                    for run in chunk.runs:
                        source = bytes_of(host, run, size)
                        rows[run.first * size : run.end * size].copy_(source, non_blocking=True)
                    scatter(tensors, self._index(chunk.blocks), rows.view(-1, size))
                    ends[lane] = self._record(lane.stream)
        return self._span(began, ends)

    def gather(
        self, tensors: Sequence[Tensor], blocks: Sequence[int], host: Tensor, offsets: Sequence[int]
    ) -> Span:
        began: torch.cuda.Event | None = None
        ends: dict[_Lane, torch.cuda.Event] = {}
        size, current = row_bytes(tensors), torch.cuda.current_stream(self._device)
        with self._lock, torch.inference_mode():
            for chunk in self._chunks(blocks, offsets, size):
                lane = next(self._gathers)
                if lane.free is not None:
                    current.wait_event(lane.free)
                began = began or self._record(current)
                rows = lane.memory[: len(chunk.blocks) * size]
                collect(tensors, self._index(chunk.blocks), rows.view(-1, size))
                lane.stream.wait_event(self._record(current))
                with torch.cuda.stream(lane.stream):
                    for run in chunk.runs:
                        source = rows[run.first * size : run.end * size]
                        bytes_of(host, run, size).copy_(source, non_blocking=True)
                    lane.free = ends[lane] = self._record(lane.stream)
        return self._span(began, ends)

    def _chunks(
        self, blocks: Sequence[int], offsets: Sequence[int], size: int
    ) -> Iterator[CopyChunk]:
        if size > self._lane_bytes:
            raise ValueError(f"a row of {size} bytes exceeds a lane of {self._lane_bytes}")
        return chunks(blocks, offsets, size, self._lane_bytes // size)

    def _index(self, blocks: list[int]) -> Tensor:
        """Block numbers on the device, for the current stream; from pinned memory, so no wait."""
        index = torch.tensor(blocks, dtype=torch.int64, pin_memory=True)
        return index.to(self._device, non_blocking=True)

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # a waiting thread sleeps rather than spins
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _span(self, began: torch.cuda.Event | None, ends: "dict[_Lane, torch.cuda.Event]") -> Span:
        if began is None:
            return HostSpan(0.0)
        return StreamSpan(self._device, began, list(ends.values()))
