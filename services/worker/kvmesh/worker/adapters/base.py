"""Base class of engines whose requests are streams and whose KV events come in feeds."""

from kvmesh.runtime.background import BackgroundTasks
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.request_streams import RequestStreams
from kvmesh.worker.enginecore.counters import LedgerCounts


class StreamingAdapter:
    """Streams, feeds and background tasks of an engine that is a server or a library.

    Subclasses set `_streams` when the engine has started, and `_feeds` for KV events over ZeroMQ.
    """

    def __init__(self) -> None:
        self._streams: RequestStreams | None = None
        self._feeds: list[EventFeed] = []
        self._tasks = BackgroundTasks()

    def abort(self, request: str) -> bool:
        return self._streams is not None and self._streams.abort(request)

    def event_counts(self) -> list[LedgerCounts]:
        return [feed.counts for feed in self._feeds]

    def dump(self, rank: int) -> None:
        for feed in self._feeds:
            if feed.rank == rank:
                feed.dump()

    async def drain(self) -> None:
        if self._streams is not None:
            await self._streams.drain()

    async def _pause_streams(self) -> None:
        """Stop streams and tasks. Feeds go on, and tell nobody until they get another sink."""
        await self._tasks.close()
        if self._streams is not None:
            await self._streams.close()
        for feed in self._feeds:
            feed.sink = None

    async def _stop_streams(self) -> None:
        """Stop streams, feeds and tasks; the engine itself still runs."""
        await self._pause_streams()
        for feed in self._feeds:
            await feed.close()
