"""Publisher of KV events: batched, numbered, in order, without an undetectable gap.

One batch is in flight at a time and is sent again until the server has stored it, so the stream
has the order of the events; new events collect in the next batch meanwhile. A batch whose
acknowledgement was lost appears twice in a row. If a rank's backlog exceeds its limit, it is
dropped and the engine dumps its contents instead.

The first events after a pause leave at once, with whatever else this iteration of the loop sends.
Later ones wait until a batch is due, and leave with the first event from then on: each batch costs
the server a write and an acknowledgement, and every indexer a wake-up. Routers do not need them
sooner, since they predict the blocks of requests that run; the end of a request hurries them.

An acknowledged batch may still be lost with the server that stored it. So after a reconnect every
rank's next event id is published in a batch without events, which reveals the gap to readers.
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
from kvmesh.hashing import HASH_BYTES

log = logging.getLogger(__name__)
ACK_TIMEOUT_S = 2.0
RETRY_S = 0.1
BLOCK_BYTES = 16  # two hashes of a stored block
MAX_EVENT_BLOCKS = 16384
MAX_BATCH_BYTES = 512 << 10
MAX_BACKLOG_BYTES = 64 << 20
URGENT_BYTES = 4 << 10  # events that do not wait until a batch is due: those of a long prompt
SOON_S = 0.003


class KvPublisher:
    """Publishes the events of a worker's ranks; `dump(rank)` has the engine add its contents.

    Batches are due `interval` seconds apart; events wait at most 1.5 times that long.
    """

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
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._task: asyncio.Task[None] | None = None
        self._reconnected = False
        self.published = 0
        self.published_by_rank: Counter[int] = Counter()
        self.overflows = 0

    def start(self) -> None:
        self._bus.on_reconnect.append(self._on_reconnect)
        self._bus.kv_backlogs.add(self)
        self._task = asyncio.create_task(self._run(), name="kv events")

    def add(self, rank: int, events: Iterable[KvEvent]) -> None:
        """Queue events of a rank."""
        backlog = self._backlog(rank)
        if backlog.overflowed:
            return
        backlog.extend(events, min(MAX_EVENT_BLOCKS, self._max_batch_bytes // BLOCK_BYTES))
        if backlog.bytes > backlog.limit:
            log.warning("too many unsent KV events of rank %d: dropped in favour of a dump", rank)
            backlog.overflow()
            self.overflows += 1
            self._bus.counts.kv_overflows += 1
        self._drained.clear()
        self._schedule(urgent=backlog.overflowed or backlog.bytes >= URGENT_BYTES)

    def skip(self, rank: int, count: int) -> None:
        """Leave a gap of `count` event ids, so that indexers request a dump of the rank."""
        self._backlog(rank).next_id += count

    def hurry(self) -> None:
        """Make a batch due SOON_S after the last one."""
        self._due_at = min(self._due_at, self._sent_at + SOON_S)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._schedule()

    def next_event(self, rank: int) -> int | None:
        """The id of the next event to be added; None if a dump of the rank is due."""
        backlog = self._backlog(rank)
        return None if backlog.overflowed else backlog.next_id + len(backlog)

    @property
    def next_events(self) -> dict[int, int]:
        """The id of the next event of each rank; a dump that is due leaves a gap before it."""
        return {
            rank: backlog.next_id + len(backlog) + backlog.overflowed
            for rank, backlog in self._backlogs.items()
        }

    async def close(self, timeout: float = 2.0) -> None:
        """Send the backlog, for at most `timeout` seconds."""
        task, self._task = self._task, None
        if task is None:
            return
        self._bus.on_reconnect.remove(self._on_reconnect)
        self._bus.kv_backlogs.discard(self)
        self._interval = 0.0
        self._wake.set()
        try:
            async with asyncio.timeout(timeout):
                await self._drained.wait()
        except TimeoutError:
            log.warning("closing with unsent KV events")
        task.cancel()
        await asyncio.wait([task])

    def _backlog(self, rank: int) -> "Backlog":
        backlog = self._backlogs.get(rank)
        if backlog is None:
            backlog = self._backlogs[rank] = Backlog(self._max_backlog)
        return backlog

    @property
    def backlog_bytes(self) -> int:
        """Estimated size of the unsent events of all ranks."""
        return sum(backlog.bytes for backlog in self._backlogs.values())

    @property
    def _max_batch_bytes(self) -> int:
        """Size limit of a batch, well below the server's limit."""
        return min(MAX_BATCH_BYTES, self._bus.max_payload // 2)

    def _on_reconnect(self) -> None:
        self._reconnected = True
        self._wake.set()

    def _queue_dump(self, rank: int, backlog: "Backlog") -> None:
        """Queue a dump. Its size is that of the cache and may exceed the limit of a backlog."""
        backlog.overflowed = False
        backlog.limit = math.inf
        self._dump(rank)
        backlog.limit = backlog.bytes + self._max_backlog

    def _schedule(self, urgent: bool = False) -> None:
        """Send in the next iteration of the loop, or once a batch is due."""
        if urgent or self._loop.time() >= self._due_at:
            self._wake.set()
        elif self._timer is None:
            # later than due, so that the events of a running engine wake this process once
            slack = (self._due_at - self._sent_at) / 2
            self._timer = self._loop.call_at(self._due_at + slack, self._wake.set)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._sent_at = self._loop.time()
            self._due_at = self._sent_at + self._interval
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            reconnected, self._reconnected = self._reconnected, False
            for rank, backlog in list(self._backlogs.items()):
                if backlog.overflowed:
                    self._queue_dump(rank, backlog)
                if reconnected and backlog.next_id:
                    await self._send(rank, backlog, [])
                queued = backlog.next_id + len(backlog)
                while backlog.next_id < queued and (events := backlog.pop(self._max_batch_bytes)):
                    await self._send(rank, backlog, events)
            if any(len(backlog) or backlog.overflowed for backlog in self._backlogs.values()):
                self._schedule()
            elif not self._wake.is_set():
                self._drained.set()

    async def _send(self, rank: int, backlog: "Backlog", events: list[KvEvent]) -> None:
        batch = KvBatch(self._worker, self._instance, rank, backlog.next_id, time.time(), events)
        backlog.next_id += len(events)
        payload = encode(batch)
        failing = False
        try:
            while not await self._store(payload, quiet=failing):
                failing = True
                self._bus.counts.kv_retries += 1
                await asyncio.sleep(RETRY_S)
        except MessageTooLarge:
            limit = self._bus.max_payload
            log.warning("NATS accepts only %d bytes now: dumping rank %d anew", limit, rank)
            backlog.overflow()
            self._wake.set()
            return
        self.published += len(events)
        self._bus.counts.kv_events += len(events)
        self.published_by_rank[rank] += len(events)

    async def _store(self, payload: bytes, quiet: bool) -> bool:
        """Try to store a batch; returns success, raises MessageTooLarge if a retry cannot help."""
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
    """Unsent events of one rank, in order, and the id of the next event to be sent.

    `bytes` estimates their size; the caller keeps it within `limit`.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.next_id = 0
        self.bytes = 0
        self.overflowed = False
        self._events: list[KvEvent] = []

    def __len__(self) -> int:
        return len(self._events)

    def extend(self, events: Iterable[KvEvent], max_blocks: int = MAX_EVENT_BLOCKS) -> None:
        """Queue events, split into parts of at most `max_blocks` blocks."""
        for event in events:
            size = _size(event)
            if size <= HASH_BYTES * max_blocks:  # the usual case: it fits whole
                self._events.append(event)
                self.bytes += size
                continue
            for part in _parts(event, max_blocks):
                self._events.append(part)
                self.bytes += _size(part)

    def overflow(self) -> None:
        self.overflowed = True
        self._events = []
        self.bytes = 0

    def pop(self, limit: int) -> list[KvEvent]:
        """Remove and return the next events, about `limit` bytes in all, at least one if any."""
        size = count = 0
        for event in self._events:
            size += _size(event)
            if count and size > limit:
                size -= _size(event)
                break
            count += 1
        popped, self._events = self._events[:count], self._events[count:]
        self.bytes -= size
        return popped


def _parts(event: KvEvent, blocks: int) -> Iterator[KvEvent]:
    """Split an event into parts of at most `blocks` blocks, each of which fits into a message."""
    if isinstance(event, Cleared) or len(event.engine) <= HASH_BYTES * blocks:
        yield event
        return
    for start in range(0, len(event.engine), HASH_BYTES * blocks):
        part = slice(start, start + HASH_BYTES * blocks)
        if isinstance(event, Removed):
            yield replace(event, engine=event.engine[part])
        elif not start:
            yield replace(event, engine=event.engine[part], local=event.local[part])
        else:
            parent = int.from_bytes(event.engine[start - HASH_BYTES : start], "little")
            yield Stored(event.tier, parent, event.engine[part], event.local[part])


def _size(event: KvEvent) -> int:
    if isinstance(event, Cleared):
        return 32
    if isinstance(event, Removed):
        return 32 + len(event.engine)
    return 64 + len(event.engine) + len(event.local)
