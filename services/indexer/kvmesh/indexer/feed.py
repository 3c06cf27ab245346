"""The feed: reads and decodes the KV stream and applies it to the rank states."""

import asyncio
import logging
import time
from dataclasses import dataclass

from kvmesh.bus.client import Bus
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.indexer.decoding import EventSource, MalformedBatch, decode, source_of
from kvmesh.indexer.rank_state import RankStates

log = logging.getLogger(__name__)
REMEMBERED_SOURCES = 65536
IDLE_S = 0.05
DRIFT = 0.02


class Lag:
    """Seconds this reader is behind the stream, independent of the server's clock.

    The server sends at once, so waiting messages are in flight or in buffers and cannot be
    counted; the lag is derived from message ages. The least age so far is the clock difference
    plus the delivery time. The estimate grows slowly, so that it recovers from a clock change.
    """

    def __init__(self) -> None:
        self._min_age = float("inf")
        self._behind = 0.0
        self._applied = 0.0

    def note(self, stored: float, now: float) -> None:
        """Record a message stored at `stored` (server clock) and applied at `now` (local clock)."""
        age = now - stored
        self._min_age = min(age, self._min_age + DRIFT * (now - self._applied))
        self._behind = age - self._min_age
        self._applied = now

    def seconds(self, now: float, pending: int) -> float:
        """The lag; 0 if no message arrived for IDLE_S and none is `pending` at the server."""
        silence = max(0.0, now - self._applied)
        if pending:
            return self._behind + silence
        return self._behind if silence < IDLE_S else 0.0


@dataclass(slots=True)
class FeedCounts:
    """Totals since the start, by metric name."""

    messages: int = 0
    malformed: int = 0
    stream_gaps: int = 0


class Feed:
    """Applies the KV stream to `states`."""

    def __init__(self, bus: Bus, states: RankStates) -> None:
        self._bus = bus
        self._states = states
        self._sources: dict[str, EventSource] = {}
        self._reported: set[str] = set()
        self._lag = Lag()
        self._reader: StreamReader | None = None
        self.applied = 0
        self.applied_stored = 0.0  # the server's time of storing the message `applied`
        self.counts = FeedCounts()
        self.bytes = 0
        self.rewinds = 0  # times the stream was replaced or rewound

    @property
    def lag(self) -> float:
        """Seconds the index may be behind the stream; 0 if no message is unread."""
        silence = self._reader.silent_for if self._reader else 0.0
        return max(silence, self._lag.seconds(time.time(), self.pending))

    @property
    def pending(self) -> int:
        """Unread messages of the stream."""
        return self._reader.pending if self._reader else 0

    async def open(self, covered: int, stored: float | None = None) -> None:
        """Read the messages after `covered`; if the next ones are lost, all ranks become unknown.

        `stored` is the time at which the message `covered` was stored, if known.
        """
        stream, subject = self._bus.subjects.kv_stream, self._bus.subjects.kv_all
        self.applied = covered
        info = await self._bus.js.stream_info(stream)
        if info.state.first_seq > covered + 1:
            self._on_gap(info.state.first_seq)
            self.applied = info.state.first_seq - 1
            stored = None
        self.applied_stored = stored or 0.0
        start = Start(after=self.applied, stored=stored)
        self._reader = StreamReader(
            self._bus, stream, subject, self._on_message, start, self._on_recreated
        )
        await self._reader.open()

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()

    async def catch_up(self, stopping: asyncio.Event) -> None:
        """Return when every stored message is applied, or when `stopping` is set."""
        events = [stopping] if self._reader is None else [self._reader.caught_up, stopping]
        waits = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _on_message(self, message: StreamMessage) -> None:
        if message.seq > self.applied + 1:
            self._on_gap(message.seq)
        self.applied, self.applied_stored = message.seq, message.time
        self.counts.messages += 1
        self.bytes += len(message.data)
        self._apply(message)
        self._lag.note(message.time, time.time())

    def _apply(self, message: StreamMessage) -> None:
        source = self._sources.get(message.subject) or self._add_source(message.subject)
        try:
            events = decode(source, message.data)
        except MalformedBatch as error:
            self.counts.malformed += 1
            self._log_once(message.subject, str(error))
            return
        bad = self._states.counts.bad_events
        self._states.apply(events)
        if self._states.counts.bad_events > bad:
            self._log_once(message.subject, "some events are unreadable")

    def _add_source(self, subject: str) -> EventSource:
        if len(self._sources) >= REMEMBERED_SOURCES:
            self._sources.clear()
            self._reported.clear()
        source = self._sources[subject] = source_of(subject)
        return source

    def _log_once(self, subject: str, reason: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            log.warning("skipped KV events on %s (logged once): %s", subject, reason)

    def _on_gap(self, seq: int) -> None:
        self.counts.stream_gaps += 1
        log.warning(
            "KV messages %d to %d are gone; requesting dumps of all workers",
            self.applied + 1,
            seq - 1,
        )
        self._states.mark_all_unknown()

    def _on_recreated(self) -> None:
        self.counts.stream_gaps += 1
        self.rewinds += 1
        self.applied, self.applied_stored = 0, 0.0
        self._states.mark_all_unknown()
