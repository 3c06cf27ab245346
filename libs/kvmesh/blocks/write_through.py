"""Write-through of full blocks, off the critical path: bounded, in batches, never in the way.

What does not fit into the queue is skipped and counted: it can be computed again.
"""

import asyncio
import logging
from array import array
from collections import OrderedDict
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvmesh.blocks.kvbm_client import KvbmPrompt, PendingWrite, StoreClient
from kvmesh.bus.errors import cause
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Held = TypeVar("Held", contravariant=True)


class BlockSource(Protocol[Held]):
    """The engine that blocks are copied from; `item` is its own name for blocks of a request."""

    def hold(self, item: Held, key: bytes) -> KvbmPrompt | None:
        """Keep the blocks where they are and describe them, digests under `key`; None: gone."""
        ...

    async def copy(self, item: Held, writing: PendingWrite) -> "array[int]":
        """Copy what is wanted into the arena; checksums of as many leading blocks as were."""
        ...

    def release(self, item: Held) -> None:
        """The blocks of an item that was held may go."""
        ...

    def drop(self, item: Held) -> None:
        """An item will not be held, as there is nobody to write it to."""
        ...


class _Waiting(NamedTuple, Generic[Item]):
    item: Item
    first: int
    blocks: int


class WriteThrough(Generic[Item]):
    """At most `limit` blocks wait, and `lanes` requests are written at a time.

    `written` and `skipped` count blocks.
    """

    def __init__(
        self, client: StoreClient, source: BlockSource[Item], limit: int, lanes: int = 2
    ) -> None:
        self._client = client
        self._source = source
        self._limit = limit
        self._lanes = lanes
        self._queue: OrderedDict[str, _Waiting[Item]] = OrderedDict()
        self._under_way: set[str] = set()
        self._ending: set[str] = set()
        self._blocks = 0
        self._wake = asyncio.Event()
        self._tasks = BackgroundTasks()
        self.written = 0
        self.skipped = 0

    @property
    def idle(self) -> bool:
        """Whether everything that was put has been dealt with."""
        return not self._queue and not self._under_way

    def start(self) -> None:
        for lane in range(self._lanes):
            self._tasks.start(self._run(), f"write-through {lane}")

    async def close(self) -> None:
        await self._tasks.close()

    def put(self, request: str, item: Item, first: int, end: int) -> bool:
        """Queue blocks `first` to `end` of a request; `item` stands for all up to `end`.

        False if they are skipped: put them again with the next ones.
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

    def end(self, request: str) -> None:
        """The request computes nothing more: say so once its blocks are written."""
        if request in self._queue or request in self._under_way:
            self._ending.add(request)
        else:
            self._client.computed(request)

    async def _run(self) -> None:
        while True:
            request = next((r for r in self._queue if r not in self._under_way), None)
            if request is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            waiting = self._queue.pop(request)
            self._blocks -= waiting.blocks
            self._under_way.add(request)
            try:
                await self._write(waiting)
            finally:
                self._under_way.discard(request)
                self._on_written(request)

    def _on_written(self, request: str) -> None:
        if request in self._queue:
            self._wake.set()
        elif request in self._ending:
            self._ending.discard(request)
            self._client.computed(request)

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
        except Exception as error:  # of any engine: its blocks can be computed again
            log.error("cannot write blocks through: %s", cause(error))

    async def _copy(self, prompt: KvbmPrompt, waiting: _Waiting[Item]) -> None:
        async with self._client.writing(prompt, waiting.first) as writing:
            if writing is not None:
                writing.checksums = await self._source.copy(waiting.item, writing)
                self.written += len(writing.checksums)
