"""Write-through of vLLM's blocks by its workers, from copies: vLLM may reuse its blocks at once."""

import asyncio
import logging
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from kvmesh._native import xxh3
from kvmesh.blocks.kvbm_client import KvbmClient, KvbmPrompt, PendingWrite
from kvmesh.blocks.write_through import WriteThrough
from kvmesh.bus.messages import KvLayout
from kvmesh.worker.adapters.arena_tensors import ArenaTensors
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions, KvbmBridge, PromptChain
from kvmesh.worker.engines.vllm.kvbm.parts import KvParts
from kvmesh.worker.engines.vllm.kvbm.staging import StagedRows

log = logging.getLogger(__name__)
FILL_S = 60.0  # for a step and the copies after it; the worker gives a hanging vLLM up
POLL_S = 0.002


class SavedPrompt(NamedTuple):
    """The tokens of a request's full blocks, and their digests."""

    tokens: "array[int]"
    chain: PromptChain


class StagedBlocks:
    """The content of a request's blocks that wait for write-through; the last ends at `tokens`.

    `key` names them in the queue.
    """

    def __init__(self, key: str, prompt: SavedPrompt) -> None:
        self.key = key
        self.prompt = prompt
        self.tokens = 0
        self.staged: list[StagedRows] = []
        self.rows: dict[int, tuple[StagedRows, int]] = {}


class PartWriter:
    """Writes the blocks of one part through; at most `limit` wait.

    With `has_gaps`, a request's blocks are not consecutive.
    """

    def __init__(
        self,
        client: KvbmClient,
        layout: KvLayout,
        arenas: ArenaTensors,
        limit: int,
        has_gaps: bool = False,
    ) -> None:
        self._layout = layout
        self._has_gaps = has_gaps
        self._arenas = arenas
        self._limit = limit
        self._queued_blocks = 0
        self._staged: dict[str, StagedBlocks] = {}
        self._writer: WriteThrough[StagedBlocks] = WriteThrough(client, self, limit)
        self._writer.start()

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of blocks written through and skipped."""
        return self._writer.written, self._writer.skipped

    async def flush(self, timeout_s: float) -> int:
        """Write what waits; returns the number of blocks left after `timeout_s` seconds."""
        return await self._writer.flush({}, lambda _: 0, timeout_s)

    async def close(self) -> None:
        await self._writer.close()

    def has_capacity(self, blocks: int) -> bool:
        return self._queued_blocks + blocks <= self._limit

    def put(self, request: str, prompt: SavedPrompt, first: int, rows: StagedRows) -> None:
        """Queue the blocks from `first` on, with content `rows`."""
        key = f"{request} {first}" if self._has_gaps else request
        item = self._staged.get(key) or StagedBlocks(key, prompt)
        end = first + len(rows)
        if not self._writer.put(key, item, first, end):
            rows.release()
            return
        self._staged[key] = item
        item.tokens = end * self._layout.block_size
        item.staged.append(rows)
        item.rows.update((first + number, (rows, number)) for number in range(len(rows)))
        self._queued_blocks += len(rows)

    # BlockSource of the writer

    def hold(self, item: StagedBlocks, key: bytes) -> KvbmPrompt | None:
        del self._staged[item.key]
        tokens = item.prompt.tokens[: item.tokens]
        (prompt,) = item.prompt.chain.prompts(tokens, key, [self._layout])
        return prompt

    async def copy(self, item: StagedBlocks, pending: PendingWrite) -> "array[int]":
        async with asyncio.timeout(FILL_S):
            while not all(rows.filled for rows in item.staged):
                await asyncio.sleep(POLL_S)
        pairs = zip(pending.blocks, pending.offsets, strict=True)
        placed = [(*item.rows[block], offset) for block, offset in pairs]
        return await asyncio.to_thread(_copy_rows, placed, self._arenas.of(pending.arena))

    def release(self, item: StagedBlocks) -> None:
        self._queued_blocks -= sum(map(len, item.staged))
        for rows in item.staged:
            rows.release()
        item.staged.clear()
        item.rows.clear()

    def drop(self, item: StagedBlocks) -> None:
        del self._staged[item.key]
        self.release(item)


class WorkerBridge(KvbmBridge):
    """A rank's bridge: maps the arena to load from, and writes the blocks of its parts through."""

    def __init__(
        self, options: BridgeOptions, parts: KvParts, rank: int, device: torch.device
    ) -> None:
        self._lead = parts.part(0, 0)
        self._has_gaps = [group.has_state for group in parts.groups]
        self._prompts: dict[str, SavedPrompt] = {}
        self._skipped = 0
        super().__init__(options, f"rank{rank}", parts.of_rank(rank), device)
        self._writers: list[PartWriter] = self._wait(self._start())

    def arena(self, name: str) -> Tensor | None:
        """All bytes of the named arena, if attached."""
        return self._arenas.named(name)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of blocks written through and skipped, of the first group."""
        written, skipped = self._writers[0].counts
        return written, skipped + self._skipped

    def count_skipped(self, blocks: int) -> None:
        """Count blocks not written because a queue is full."""
        self._skipped += blocks

    def has_capacity(self, blocks: int) -> bool:
        """True if each queue can hold `blocks` more blocks."""
        return self.is_attached and all(writer.has_capacity(blocks) for writer in self._writers)

    def extend_prompt(self, request: str, origin: RequestOrigin, tokens: "array[int]") -> None:
        """Append the tokens of full blocks to a request's prompt."""
        self._loop.call_soon_threadsafe(self._extend_prompt, request, origin, tokens)

    def write_through(self, request: str, groups: list[tuple[int, StagedRows]]) -> None:
        """Queue the first block and the content of the blocks of each group for write-through."""
        self._loop.call_soon_threadsafe(self._enqueue, request, groups)

    def forget_prompts(self, requests: set[str]) -> None:
        """Forget the prompts of requests without further saves; what is queued is written."""
        self._loop.call_soon_threadsafe(self._forget_prompts, requests)

    def _extend_prompt(self, request: str, origin: RequestOrigin, tokens: "array[int]") -> None:
        known = self._prompts.get(request)
        if known is None:
            chain = PromptChain(self._options, origin, self._lead)
            known = self._prompts[request] = SavedPrompt(array("I"), chain)
        known.tokens.extend(tokens)

    def _enqueue(self, request: str, groups: list[tuple[int, StagedRows]]) -> None:
        for writer, (first, rows) in zip(self._writers, groups, strict=True):
            if len(rows):
                writer.put(request, self._prompts[request], first, rows)

    def _forget_prompts(self, requests: set[str]) -> None:
        for request in requests:
            self._prompts.pop(request, None)

    async def _start(self) -> list[PartWriter]:
        parts = zip(self._clients, self._layouts, self._has_gaps, strict=True)
        return [
            PartWriter(client, layout, self._arenas, self._options.queue, has_gaps)
            for client, layout, has_gaps in parts
        ]

    async def _close(self) -> None:
        limit = self._options.flush_s
        left = await asyncio.gather(*(writer.flush(limit) for writer in self._writers))
        if any(left):
            log.warning("%d blocks did not reach a lower tier in %g s", max(left), limit)
        for writer in self._writers:
            await writer.close()
        await super()._close()


def _copy_rows(placed: list[tuple[StagedRows, int, int]], host: Tensor) -> "array[int]":
    checksums = array("Q")
    for rows, number, offset in placed:
        row = rows.row(number)
        host[offset : offset + len(row)].copy_(row)
        checksums.append(xxh3(row.numpy().data))
    return checksums
