"""KV events on their way to the stream: gathered, numbered, in order, without a silent hole.

One batch is in flight at a time and is sent again until the server has it, so the order on the
stream is the order of the events; meanwhile new ones gather into the next batch. A batch whose
acknowledgement was lost appears twice in a row. When more gathers than memory should hold, a
rank's backlog is dropped and the engine is asked for all that it holds instead.

An acknowledged batch may still be lost with the server that kept it. So every rank's next number is
told after a reconnect, in a batch of no events: readers that miss some before it see the gap.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, MessageTooLarge, cause
from kvmesh.bus.messages import Cleared, KvBatch, KvEvent, Removed, Stored, encode

log = logging.getLogger(__name__)
ACK_TIMEOUT_S = 2.0
RETRY_S = 0.1
BLOCK_BYTES = 16  # of a stored block: two hashes
MAX_EVENT_BLOCKS = 16384
MAX_BATCH_BYTES = 512 << 10
MAX_BACKLOG_BYTES = 64 << 20


class KvPublisher:
    """Publishes the events of one worker's ranks; `dump` asks the engine for a rank's contents."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        worker: str,
        instance: str,
        interval: float,
        dump: Callable[[int], None],
        max_backlog: int = MAX_BACKLOG_BYTES,
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._worker = worker
        self._instance = instance
        self._interval = interval
        self._dump = dump
        self._max_backlog = max_backlog
        self._backlogs: dict[int, Backlog] = {}
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._task: asyncio.Task[None] | None = None
        self._reconnected = False
        self.published = 0
        self.published_by_rank: Counter[int] = Counter()
        self.overflows = 0

    def start(self) -> None:
        self._bus.on_reconnect.append(self._on_reconnect)
        self._task = asyncio.create_task(self._run(), name="kv events")

    def add(self, rank: int, events: Iterable[KvEvent]) -> None:
        """Queue events behind those before."""
        backlog = self._backlog(rank)
        if backlog.overflowed:
            return
        backlog.extend(events, min(MAX_EVENT_BLOCKS, self._most_bytes // BLOCK_BYTES))
        if backlog.bytes > backlog.limit:
            log.warning("too many unsent KV events of rank %d: a full dump replaces them", rank)
            backlog.overflow()
            self.overflows += 1
        self._empty.clear()
        self._wake.set()

    def skip(self, rank: int, count: int) -> None:
        """Leave a hole of `count` event ids: readers distrust the rank and ask for a dump."""
        self._backlog(rank).next_id += count

    async def close(self, timeout: float = 2.0) -> None:
        """Send what is left, for at most `timeout` seconds."""
        task, self._task = self._task, None
        if task is None:
            return
        self._bus.on_reconnect.remove(self._on_reconnect)
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            log.warning("leaving with unsent KV events")
        task.cancel()
        await asyncio.wait([task])

    def _backlog(self, rank: int) -> "Backlog":
        backlog = self._backlogs.get(rank)
        if backlog is None:
            backlog = self._backlogs[rank] = Backlog(self._max_backlog)
        return backlog

    @property
    def _most_bytes(self) -> int:
        """Of a batch: well below what the server takes."""
        return min(MAX_BATCH_BYTES, self._bus.max_payload // 2)

    def _on_reconnect(self) -> None:
        self._reconnected = True
        self._wake.set()

    def _start_anew(self, rank: int, backlog: "Backlog") -> None:
        """Queue a dump, which may be larger than a backlog: its size is that of the cache."""
        backlog.overflowed = False
        backlog.limit = math.inf
        self._dump(rank)
        backlog.limit = backlog.bytes + self._max_backlog

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._interval)
            self._wake.clear()
            reconnected, self._reconnected = self._reconnected, False
            for rank, backlog in list(self._backlogs.items()):
                if backlog.overflowed:
                    self._start_anew(rank, backlog)
                if reconnected and backlog.next_id:
                    await self._send(rank, backlog, [])
                while events := backlog.take(self._most_bytes):
                    await self._send(rank, backlog, events)
            if not self._wake.is_set():
                self._empty.set()

    async def _send(self, rank: int, backlog: "Backlog", events: list[KvEvent]) -> None:
        batch = KvBatch(self._worker, self._instance, rank, backlog.next_id, time.time(), events)
        backlog.next_id += len(events)
        payload = encode(batch)
        failing = False
        try:
            while not await self._offer(payload, quiet=failing):
                failing = True
                await asyncio.sleep(RETRY_S)
        except MessageTooLarge:
            most = self._bus.max_payload
            log.warning("NATS takes %d bytes now: a dump of rank %d in smaller parts", most, rank)
            backlog.overflow()
            self._wake.set()
            return
        self.published += len(events)
        self.published_by_rank[rank] += len(events)

    async def _offer(self, payload: bytes, quiet: bool) -> bool:
        """Whether the server has it; raises MessageTooLarge if it never will."""
        if not self._bus.connected:
            return False
        try:
            await self._bus.store(self._subject, payload, ACK_TIMEOUT_S)
        except MessageTooLarge:
            raise
        except BusError as error:
            if not quiet:
                log.warning("cannot publish KV events, retrying: %s", cause(error))
            return False
        return True


class Backlog:
    """Unsent events of one rank, in order, and the id of the next one to be sent.

    `bytes` is about their size; whoever adds to it keeps it within `limit`.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.next_id = 0
        self.bytes = 0
        self.overflowed = False
        self._events: list[KvEvent] = []

    def extend(self, events: Iterable[KvEvent], most_blocks: int = MAX_EVENT_BLOCKS) -> None:
        """Queue events, each in parts of at most so many blocks."""
        for event in events:
            for part in _parts(event, most_blocks):
                self._events.append(part)
                self.bytes += _size(part)

    def overflow(self) -> None:
        self.overflowed = True
        self._events = []
        self.bytes = 0

    def take(self, limit: int) -> list[KvEvent]:
        """The next events of about `limit` bytes together, at least one if there is any."""
        size = count = 0
        for event in self._events:
            size += _size(event)
            if count and size > limit:
                size -= _size(event)
                break
            count += 1
        taken, self._events = self._events[:count], self._events[count:]
        self.bytes -= size
        return taken


def _parts(event: KvEvent, blocks: int) -> Iterator[KvEvent]:
    """The same in events of at most so many blocks, so that a message holds any."""
    if isinstance(event, Cleared) or len(event.engine) <= 8 * blocks:
        yield event
        return
    for start in range(0, len(event.engine), 8 * blocks):
        part = slice(start, start + 8 * blocks)
        if isinstance(event, Removed):
            yield Removed(event.tier, event.engine[part])
        elif not start:
            yield replace(event, engine=event.engine[part], local=event.local[part])
        else:
            parent = int.from_bytes(event.engine[start - 8 : start], "little")
            yield Stored(event.tier, parent, event.engine[part], event.local[part])


def _size(event: KvEvent) -> int:
    if isinstance(event, Cleared):
        return 32
    if isinstance(event, Removed):
        return 32 + len(event.engine)
    return 64 + len(event.engine) + len(event.local)
