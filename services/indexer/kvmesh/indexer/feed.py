"""From the KV stream to the holdings: reads, decodes, counts what cannot be used."""

import asyncio
import logging
import time

from kvmesh.bus.client import Bus
from kvmesh.bus.reader import Start, StreamMessage, StreamReader
from kvmesh.indexer.decoding import EventSource, MalformedBatch, decode, source_of
from kvmesh.indexer.rank_state import RankStates

log = logging.getLogger(__name__)
REMEMBERED_SOURCES = 65536
IDLE_S = 0.05
DRIFT = 0.02


class Lag:
    """How far behind the stream this reader is, whatever the server's clock says.

    The server sends at once, so what waits is on its way or in our buffers and cannot be counted:
    the age of the messages tells. The youngest age seen is the difference of the clocks plus the
    delivery time; it may grow slowly, so that a clock that was set forgets its past.
    """

    def __init__(self) -> None:
        self._youngest = float("inf")
        self._behind = 0.0
        self._applied = 0.0

    def note(self, stored: float, now: float) -> None:
        """A message stored at `stored` by the server's clock was applied at `now` by ours."""
        age = now - stored
        self._youngest = min(age, self._youngest + DRIFT * (now - self._applied))
        self._behind = age - self._youngest
        self._applied = now

    def seconds(self, now: float, pending: int) -> float:
        """0 once nothing has come for a moment and nothing is `pending` at the server."""
        silence = max(0.0, now - self._applied)
        if pending:
            return self._behind + silence
        return self._behind if silence < IDLE_S else 0.0


class Feed:
    """Follows the KV stream into `holdings`."""

    def __init__(self, bus: Bus, holdings: RankStates) -> None:
        self._bus = bus
        self._holdings = holdings
        self._sources: dict[str, EventSource] = {}
        self._reported: set[str] = set()
        self._lag = Lag()
        self._reader: StreamReader | None = None
        self.applied = 0
        self.applied_stored = 0.0  # when the server stored it
        self.messages = 0
        self.bytes = 0
        self.malformed = 0
        self.holes = 0
        self.rewinds = 0  # how often the stream turned out to be another one

    @property
    def lag(self) -> float:
        """Seconds by which answers may be behind the stream; 0 when nothing waits."""
        silence = self._reader.silent_for if self._reader else 0.0
        return max(silence, self._lag.seconds(time.time(), self.pending))

    @property
    def pending(self) -> int:
        """Messages in the stream that have not been read."""
        return self._reader.pending if self._reader else 0

    async def open(self, covered: int, stored: float | None = None) -> None:
        """Read on from `covered`; what ranks hold is in doubt if the next messages are gone.

        `stored` is when the message `covered` was stored, if that is known.
        """
        stream, subject = self._bus.subjects.kv_stream, self._bus.subjects.kv_all
        self.applied = covered
        info = await self._bus.js.stream_info(stream)
        if info.state.first_seq > covered + 1:
            self._on_hole(info.state.first_seq)
            self.applied = info.state.first_seq - 1
            stored = None
        self.applied_stored = stored or 0.0
        start = Start(after=self.applied, stored=stored)
        self._reader = StreamReader(
            self._bus, stream, subject, self._take, start, self._on_recreated
        )
        await self._reader.open()

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()

    async def catch_up(self, stopping: asyncio.Event) -> None:
        """Return when all that is stored has been applied, or when `stopping` is set."""
        events = [stopping] if self._reader is None else [self._reader.caught_up, stopping]
        waits = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _take(self, message: StreamMessage) -> None:
        if message.seq > self.applied + 1:
            self._on_hole(message.seq)
        self.applied, self.applied_stored = message.seq, message.time
        self.messages += 1
        self.bytes += len(message.data)
        self._apply(message)
        self._lag.note(message.time, time.time())

    def _apply(self, message: StreamMessage) -> None:
        source = self._sources.get(message.subject) or self._learn(message.subject)
        try:
            events = decode(source, message.data)
        except MalformedBatch as error:
            self.malformed += 1
            self._report(message.subject, str(error))
            return
        bad = self._holdings.counts.bad_events
        self._holdings.apply(events)
        if self._holdings.counts.bad_events > bad:
            self._report(message.subject, "some of its events cannot be read")

    def _learn(self, subject: str) -> EventSource:
        if len(self._sources) >= REMEMBERED_SOURCES:
            self._sources.clear()
            self._reported.clear()
        source = self._sources[subject] = source_of(subject)
        return source

    def _report(self, subject: str, reason: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            log.warning("skipped KV events on %s, from now on silently: %s", subject, reason)

    def _on_hole(self, seq: int) -> None:
        self.holes += 1
        log.warning(
            "KV messages %d to %d are gone; asking every worker for a dump",
            self.applied + 1,
            seq - 1,
        )
        self._holdings.doubt_all()

    def _on_recreated(self) -> None:
        self.holes += 1
        self.rewinds += 1
        self.applied, self.applied_stored = 0, 0.0
        self._holdings.doubt_all()
