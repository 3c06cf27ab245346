"""Merges several streams by the time at which the server stored their messages."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from kvmesh.bus.client import Bus
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader

MAX_WAITING = 256


class MergedReader:
    """Passes stored messages to `handler` by time, then new ones on arrival.

    While one stream has not caught up, the others wait for its next message: up to MAX_WAITING
    messages of each are buffered here, then flow control pauses the server.
    """

    def __init__(self, bus: Bus, handler: Callable[[StreamMessage], None], start: Start) -> None:
        self._bus = bus
        self._handler = handler
        self._start = start
        self._sources: list[_Source] = []
        self._watching: list[asyncio.Task[None]] = []

    def add(self, stream: str, subject: str) -> None:
        """Read the messages of `stream` that match `subject`; call before `open`."""
        source = _Source()
        on_message = partial(self._on_message, source)
        source.reader = StreamReader(self._bus, stream, subject, on_message, self._start)
        self._sources.append(source)

    async def open(self) -> None:
        """Start reading; raises the server's error if a stream cannot be read."""
        for source in self._sources:
            source.reader.pause()
            await source.reader.open()
        for source in self._sources:
            source.reader.resume()
            self._watching.append(asyncio.create_task(self._watch(source), name="present"))

    async def caught_up(self) -> None:
        """Return once all messages stored at the start have been handled."""
        await asyncio.gather(*self._watching)

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        for source in self._sources:
            await source.reader.close()

    async def _watch(self, source: "_Source") -> None:
        await source.reader.caught_up.wait()
        self._emit()

    def _on_message(self, source: "_Source", message: StreamMessage) -> None:
        source.waiting.append(message)
        if len(source.waiting) >= MAX_WAITING:
            source.reader.pause()
        self._emit()

    def _emit(self) -> None:
        while all(source.is_ready for source in self._sources):
            first = min(self._sources, key=_next_time)
            if not first.waiting:
                break
            self._handler(first.waiting.popleft())
            if not first.waiting:
                first.reader.resume()


class _Source:
    """A stream and its buffered messages."""

    reader: StreamReader

    def __init__(self) -> None:
        self.waiting: deque[StreamMessage] = deque()

    @property
    def is_ready(self) -> bool:
        """The stream's next message is buffered, or no stored one is left."""
        return bool(self.waiting) or self.reader.caught_up.is_set()


def _next_time(source: _Source) -> float:
    return source.waiting[0].time if source.waiting else float("inf")
