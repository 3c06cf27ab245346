"""Several streams as one, in the order in which the server stored their messages."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from kvmesh.bus.client import Bus
from kvmesh.bus.reader import Start, StreamMessage, StreamReader

MOST_WAITING = 256


class MergedReader:
    """Feeds what streams hold to `handler`, by time, then what comes as it comes.

    While a stream is behind the present, the others wait for its next message: MOST_WAITING of
    each here, and what the server's flow control lets through.
    """

    def __init__(self, bus: Bus, handler: Callable[[StreamMessage], None], start: Start) -> None:
        self._bus = bus
        self._handler = handler
        self._start = start
        self._sources: list[_Source] = []
        self._watching: list[asyncio.Task[None]] = []

    def add(self, stream: str, subject: str) -> None:
        """Before `open`: read the messages of `stream` that match `subject`."""
        source = _Source()
        take = partial(self._take, source)
        source.reader = StreamReader(self._bus, stream, subject, take, self._start)
        self._sources.append(source)

    async def open(self) -> None:
        """Begin; raises the server's error if a stream cannot be read."""
        for source in self._sources:
            source.reader.pause()
            await source.reader.open()
        for source in self._sources:
            source.reader.resume()
            self._watching.append(asyncio.create_task(self._watch(source), name="present"))

    async def caught_up(self) -> None:
        """Return once all that was there has been handled."""
        await asyncio.gather(*self._watching)

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        for source in self._sources:
            await source.reader.close()

    async def _watch(self, source: "_Source") -> None:
        await source.reader.caught_up.wait()
        self._hand_on()

    def _take(self, source: "_Source", message: StreamMessage) -> None:
        source.waiting.append(message)
        if len(source.waiting) >= MOST_WAITING:
            source.reader.pause()
        self._hand_on()

    def _hand_on(self) -> None:
        while all(source.is_known for source in self._sources):
            first = min(self._sources, key=_next_time)
            if not first.waiting:
                break
            self._handler(first.waiting.popleft())
            if not first.waiting:
                first.reader.resume()


class _Source:
    """A stream and those of its messages that wait for their turn."""

    reader: StreamReader

    def __init__(self) -> None:
        self.waiting: deque[StreamMessage] = deque()

    @property
    def is_known(self) -> bool:
        """Whether it is known what comes next: a message that waits here, or one yet to come."""
        return bool(self.waiting) or self.reader.caught_up.is_set()


def _next_time(source: _Source) -> float:
    return source.waiting[0].time if source.waiting else float("inf")
