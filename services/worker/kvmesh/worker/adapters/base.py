"""What the engines have in common that answer with streams and tell of their caches in feeds."""

import asyncio
from collections.abc import Coroutine

from kvmesh.worker.adapters.event_feed import EventFeed
from kvmesh.worker.adapters.request_streams import RequestStreams


class StreamingAdapter:
    """Base of an engine that is somebody else's: its streams, its feeds and its own tasks.

    `_streams` is set once the engine has started, and `_feeds` if it has KV events over ZeroMQ.
    """

    def __init__(self) -> None:
        self._streams: RequestStreams | None = None
        self._feeds: list[EventFeed] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def abort(self, request: str) -> bool:
        return self._streams is not None and self._streams.abort(request)

    def dump(self, rank: int) -> None:
        for feed in self._feeds:
            if feed.rank == rank:
                feed.dump()

    async def drain(self) -> None:
        if self._streams is not None:
            await self._streams.drain()

    async def _stop_streams(self) -> None:
        """Stop following; the engine itself is still to be shut down."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._streams is not None:
            await self._streams.close()
        for feed in self._feeds:
            await feed.close()

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
