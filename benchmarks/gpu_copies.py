"""Copies of blocks by the engines' code, beside one plain copy of the same bytes.

On a GPU the plain copy is one cudaMemcpyAsync from or to page-locked memory.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from common import Report, median
from torch import Tensor

from kvmesh.blocks.arena import ArenaView
from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.copies.block_copies import BlockCopies
from kvmesh.worker.adapters.copies.cuda_copies import CudaBlockCopies
from kvmesh.worker.adapters.copies.host_copies import HostBlockCopies
from kvmesh.worker.engines.torch.blocks.kv_pool import KvPool

GIB = 1 << 30
TARGET = "≥ 85% of it"
LANE_BYTES = 64 << 20  # as vLLM's connector has
TOKENS, HEADS, SIZE = 16, 8, 128
LAYERS = {"2 MiB": 32, "512 KiB": 8, "128 KiB": 2}  # of 64 KiB each


class Copy(NamedTuple):
    """A copy under measurement, in one direction."""

    name: str
    downward: bool
    run: Callable[[], None]


def measure_copies(report: Report, device: torch.device, size: int, runs: int) -> float:
    """Copy `size` bytes in blocks of several sizes; returns the worst ratio to a plain copy."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file = Path(name) / "arena"
        with file.open("wb") as arena:
            arena.truncate(size)
        return asyncio.run(_measure(report, device, ArenaView(file, size), runs))


async def _measure(report: Report, device: torch.device, view: ArenaView, runs: int) -> float:
    arenas = ArenaTensors(device)
    await arenas.adopt(view)
    host, worst = arenas.of(view), 1e9
    host.random_(0, 255)
    try:
        for name, layers in LAYERS.items():
            worst = min(worst, _block_size(report, device, host, layers, name, runs))
    finally:
        await arenas.release(view)
    return worst


def _block_size(
    report: Report, device: torch.device, host: Tensor, layers: int, name: str, runs: int
) -> float:
    layout = KvLayout(
        weights="bench",
        dtype="float16",
        item_bytes=2,
        block_size=TOKENS,
        layers=[LayerLayout(HEADS, SIZE, SIZE)] * layers,
    )
    plain = torch.zeros(len(host), dtype=torch.uint8, device=device)
    copies = [
        Copy("plain", True, lambda: _plain(host, plain)),
        Copy("plain", False, lambda: _plain(plain, host)),
        *_of_pool(layout, device, host),
        *_of_connector(layout, device, host),
    ]
    found = _in_turn(copies, len(host), runs)
    worst = 1e9
    for downward, way in ((True, "to the host"), (False, "to the device")):
        base, *ours = [
            (c.name, r) for c, r in zip(copies, found, strict=True) if c.downward is downward
        ]
        beside = median(base[1])
        report.add_runs(f"plain copy {way}, beside {name}", base[1], "GiB/s")
        for who, rates in ours:
            title = f"{who}, blocks of {name}, {way}"
            report.add_runs(title, rates, "GiB/s", f"{beside:.3g}", TARGET)
            worst = min(worst, median(rates) / beside)
    return worst


def _of_pool(layout: KvLayout, device: torch.device, host: Tensor) -> list[Copy]:
    """Copies of the torch engine."""
    size = layout.block_bytes
    blocks, offsets = list(range(len(host) // size)), list(range(0, len(host), size))
    pool = KvPool(layout, len(blocks), torch.float16, device)
    return [
        Copy("torch engine", True, lambda: pool.copy_out(blocks, host, offsets)),
        Copy("torch engine", False, lambda: pool.copy_in(blocks, host, offsets)),
    ]


def _of_connector(layout: KvLayout, device: torch.device, host: Tensor) -> list[Copy]:
    """Copies of vLLM's connector: a tensor for each layer, rows in sequence and scattered."""
    size, on_gpu = layout.block_bytes, device.type == "cuda"
    count = len(host) // size
    shape = (count, HEADS, TOKENS, 2 * SIZE)
    caches = [torch.zeros(shape, dtype=torch.float16, device=device) for _ in layout.layers]
    copies: BlockCopies = HostBlockCopies(device)
    if on_gpu:
        copies = CudaBlockCopies(device, max(LANE_BYTES, size))
    blocks = random.Random(1).sample(range(count), count)
    places = {"": list(range(0, len(host), size))}
    places[", scattered"] = random.Random(2).sample(places[""], count)
    return [
        Copy(
            f"vLLM's connector{how}", downward, _bound(copies, caches, blocks, host, rows, downward)
        )
        for how, rows in places.items()
        for downward in (True, False)
    ]


def _bound(
    copies: BlockCopies,
    caches: list[Tensor],
    blocks: list[int],
    host: Tensor,
    rows: list[int],
    downward: bool,
) -> Callable[[], None]:
    def run() -> None:
        copies.begin_step()
        copy = copies.gather if downward else copies.fill
        copy(caches, blocks, host, rows).wait()

    return run


def _in_turn(copies: list[Copy], size: int, runs: int) -> list[list[float]]:
    """GiB/s of each copy in each run; in turn, so that all meet the same noise."""
    for copy in copies:
        copy.run()
    found: list[list[float]] = [[] for _ in copies]
    for _ in range(runs):
        for copy, rates in zip(copies, found, strict=True):
            start = time.perf_counter()
            copy.run()
            rates.append(size / (time.perf_counter() - start) / GIB)
    return found


def _plain(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
    if target.is_cuda or source.is_cuda:
        torch.cuda.synchronize()
