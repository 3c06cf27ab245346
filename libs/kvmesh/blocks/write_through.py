"""Write-through of full blocks to the kvbm, bounded, batched and off the critical path.

Blocks that do not fit into the queue are skipped and counted: they can be computed again.
"""

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kvmesh.blocks.kvbm_client import KvbmClient, KvbmPrompt, PendingWrite
from kvmesh.bus.errors import cause
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.tracing.names import BLOCKS, OFFLOAD
from kvmesh.tracing.tracer import continued

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Held = TypeVar("Held", contravariant=True)


class BlockSource(Protocol[Held]):
    """The engine that blocks are copied from; `item` is the engine's handle for blocks."""

    def hold(self, item: Held, key: bytes) -> KvbmPrompt | None:
        """Hold the blocks and describe them, digests under `key`; None if they are gone."""
        ...

    async def copy(self, item: Held, writing: PendingWrite) -> "array[int]":
        """Copy the wanted blocks into the arena; return checksums of the copied leading ones."""
        ...

    def release(self, item: Held) -> None:
        """Release the blocks of a held item."""
        ...

    def drop(self, item: Held) -> None:
        """Discard an item that will not be held, because there is no kvbm."""
        ...


class _Waiting(NamedTuple, Generic[Item]):
    item: Item
    first: int
    blocks: int


class WriteThrough(Generic[Item]):
    """Queues at most `limit` blocks and writes `lanes` requests at a time.

    `written` and `skipped` count blocks.
    """

    def __init__(
        self, client: KvbmClient, source: BlockSource[Item], limit: int, lanes: int = 2
    ) -> None:
        self._client = client
        self._source = source
        self._limit = limit
        self._lanes = lanes
        self._queue: OrderedDict[str, _Waiting[Item]] = OrderedDict()
        self._writing: dict[str, int] = {}
        self._ending: set[str] = set()
        self._blocks = 0
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._tasks = BackgroundTasks()
        self.written = 0
        self.skipped = 0

    @property
    def idle(self) -> bool:
        """True if the queue is empty and no write is running."""
        return not self._queue and not self._writing

    def start(self) -> None:
        for lane in range(self._lanes):
            self._tasks.start(self._run(), f"write-through {lane}")

    async def close(self) -> None:
        await self._tasks.close()

    def put(self, request: str, item: Item, first: int, end: int) -> bool:
        """Queue blocks `first` to `end` (exclusive) of a request; `item` covers all up to `end`.

        Returns False if they are skipped: pass them again with the next ones.
        """
        if self._client.key is None:
            return False
        before = self._queue.get(request)
        if before is not None:
            first = min(first, before.first)
        more = end - first - (before.blocks if before is not None else 0)
        if self._blocks + more > self._limit:
            self.skipped += more
            return False
        self._blocks += more
        self._queue[request] = _Waiting(item, first, end - first)
        self._wake.set()
        return True

    async def flush(
        self, items: dict[str, tuple[Item, int]], value: Callable[[Item], Any], timeout_s: float
    ) -> int:
        """Write what waits and all blocks of `items`, those of the greatest `value` first.

        `items` are the handle and the number of blocks by request. Returns the number of blocks
        that are not written after `timeout_s` seconds; nothing may be passed to `put` meanwhile.
        """
        for request, (item, blocks) in items.items():
            queued = self._queue.get(request)
            self._blocks += blocks - (queued.blocks if queued is not None else 0)
            self._queue[request] = _Waiting(item, 0, blocks)
        ordered = sorted(self._queue.items(), key=lambda entry: value(entry[1].item), reverse=True)
        self._queue = OrderedDict(ordered)
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.idle:
                    self._written.clear()
                    await self._written.wait()
        return self._blocks + sum(self._writing.values())

    def end(self, request: str) -> None:
        """Report that the request computes no more blocks, once its blocks are written."""
        if request in self._queue or request in self._writing:
            self._ending.add(request)
        else:
            self._client.report_computed(request)

    async def _run(self) -> None:
        while True:
            request = next((r for r in self._queue if r not in self._writing), None)
            if request is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            waiting = self._queue.pop(request)
            self._blocks -= waiting.blocks
            self._writing[request] = waiting.blocks
            try:
                await self._write(waiting)
            finally:
                del self._writing[request]
                self._on_written(request)

    def _on_written(self, request: str) -> None:
        self._written.set()
        if request in self._queue:
            self._wake.set()
        elif request in self._ending:
            self._ending.discard(request)
            self._client.report_computed(request)

    def _hold(self, item: Item) -> KvbmPrompt | None:
        key = self._client.key
        if key is None:
            self._source.drop(item)
            return None
        return self._source.hold(item, key)

    async def _write(self, waiting: _Waiting[Item]) -> None:
        try:
            prompt = self._hold(waiting.item)
            if prompt is None:
                self.skipped += waiting.blocks
                return
            try:
                await self._copy(prompt, waiting)
            finally:
                self._source.release(waiting.item)
        except Exception as error:  # any engine error: the blocks can be computed again
            log.error("cannot write blocks through: %s", cause(error))

    async def _copy(self, prompt: KvbmPrompt, waiting: _Waiting[Item]) -> None:
        async with self._client.writing(prompt, waiting.first) as writing:
            if writing is not None:
                span = continued(prompt.traceparent, OFFLOAD)
                writing.checksums = await self._source.copy(waiting.item, writing)
                self.written += len(writing.checksums)
                span.set(BLOCKS, len(writing.checksums))
                span.end()
