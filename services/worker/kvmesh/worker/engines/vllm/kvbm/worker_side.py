"""The half of the connector in a worker of vLLM: copies blocks from the arena, and aside."""

import time
from array import array

import torch
from torch import Tensor

from kvmesh.worker.engines.vllm.kvbm.parts import KvParts
from kvmesh.worker.engines.vllm.kvbm.scheduler_side import BlockLoad, BlockSave, GroupLoad
from kvmesh.worker.engines.vllm.kvbm.stats import KvmeshConnectorStats, StepMeter
from kvmesh.worker.engines.vllm.kvbm.writer import WorkerBridge


class WorkerSide:
    """Loads and saves the blocks of one tensor parallel rank.

    `received` and `failed` are the requests whose loads have ended since they were taken.
    """

    def __init__(
        self, bridge: WorkerBridge, parts: KvParts, rank: int, caches: list[list[Tensor]]
    ) -> None:
        self.bridge = bridge
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self._caches = caches
        self._device = caches[0][0].device
        self._shard = rank // parts.replicas
        self._writes = parts.writes(rank)
        self._reports = rank == 0  # one decision: all ranks are about as fast
        self._meter = StepMeter()

    def begin_step(self, finished: set[str]) -> None:
        """Begin a step, after which nothing of the `finished` requests is saved."""
        if finished and self._writes:
            self.bridge.forget_prompts(finished)
        self._meter.begin()

    def load(self, load: BlockLoad) -> None:
        host = self.bridge.arena(load.arena) if load.groups else None
        if host is None:
            self.failed.add(load.request)
        else:
            started_at = time.perf_counter()
            groups = zip(load.groups, self._caches, strict=True)
            size = sum(self._load_group(group, caches, host) for group, caches in groups)
            self._meter.copied(size, time.perf_counter() - started_at)
        self.received.add(load.request)

    def save(self, saves: list[BlockSave], prefill_tokens: int) -> None:
        """Copy blocks aside for write-through; the step computed `prefill_tokens`."""
        saved = False
        for save in saves if self._writes else []:
            self.bridge.extend_prompt(save.request, save.origin, save.tokens)
            count = max(len(group.blocks) for group in save.groups)
            if not self.bridge.has_capacity(count):
                self.bridge.count_skipped(count)
                continue
            rows = [
                (group.first, self._copy_aside(group.blocks, caches))
                for group, caches in zip(save.groups, self._caches, strict=True)
            ]
            saved = True
            self.bridge.write_through(save.request, rows)
        if saved:  # the copies have synchronized with the device, so the step has ended
            self._meter.computed(prefill_tokens)

    def take_stats(self) -> KvmeshConnectorStats | None:
        return self._meter.take(*self.bridge.counts) if self._reports else None

    def _load_group(self, load: GroupLoad, caches: list[Tensor], host: Tensor) -> int:
        """Fill the blocks of one group; return the number of bytes."""
        index, start = torch.tensor(load.blocks, device=self._device), 0
        offsets: array[int] = load.offsets[self._shard]
        for cache in caches if load.blocks else []:
            size = cache[0].numel() * cache.element_size()
            parts = [host[offset + start : offset + start + size] for offset in offsets]
            values = torch.stack(parts).view(cache.dtype).view(len(offsets), *cache.shape[1:])
            cache[index] = values.to(cache.device)
            start += size
        return start * len(load.blocks)

    def _copy_aside(self, blocks: list[int], caches: list[Tensor]) -> Tensor:
        """Copy blocks of one group to the host, one row each."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        parts = [cache[index].flatten(1).view(torch.uint8) for cache in caches]
        return torch.cat(parts, 1).cpu()


def grouped_caches(caches: dict[str, Tensor], parts: KvParts, blocks: int) -> list[list[Tensor]]:
    """The KV of each group's layers, as views [blocks, heads, tokens, ...], whatever the strides.

    Raises ValueError if a block has another size than its layout says.
    """
    grouped = []
    for group in parts.groups:
        views = [_by_block(caches[name], blocks) for name in group.layers]
        held = sum(view[0].numel() * view.element_size() for view in views)
        if held != group.layout.block_bytes:
            raise ValueError(
                f"the block manager cannot store the KV of {group.layers[0]}: "
                f"a block has {held} bytes, not {group.layout.block_bytes}"
            )
        grouped.append(views)
    return grouped


def _by_block(cache: Tensor, blocks: int) -> Tensor:
    """A view by blocks of the scheduler, which a kernel may divide into several of its own."""
    rows = cache.shape[0]
    if rows == blocks:
        return cache
    if cache.dim() < 3 or rows % blocks:
        raise ValueError(f"the KV of {blocks} blocks has the shape {list(cache.shape)}")
    return cache.view(blocks, rows // blocks, *cache.shape[1:]).transpose(1, 2)
