"""Keeps snapshots of the index and purges the part of the KV stream that they cover.

The stream is purged up to the snapshot before the newest one, so that a damaged newest snapshot
costs a longer replay and nothing else.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, BusTimeout, cause
from kvmesh.bus.stream_identity import is_rewound
from kvmesh.bus.streams import StreamLimits
from kvmesh.indexer.feed import Feed
from kvmesh.indexer.rank_state import RankStates
from kvmesh.indexer.snapshots.snapshot import (
    VERSION,
    DamagedSnapshot,
    Header,
    Packer,
    SnapshotError,
    capture,
    check,
    restore,
)
from kvmesh.indexer.snapshots.snapshot_store import Covers, Slot, SnapshotStore
from kvmesh.settings.schema import IndexerSettings

log = logging.getLogger(__name__)
CHECK_S = 0.25


@dataclass(frozen=True)
class SnapshotThresholds:
    """When a snapshot is due, by what the stream has that no snapshot covers."""

    messages: int
    bytes: float
    age_s: float

    @classmethod
    def of(cls, settings: IndexerSettings, limits: StreamLimits) -> "SnapshotThresholds":
        """The settings, kept well inside the stream's limits: those drop what nothing covers."""
        return cls(
            settings.snapshot_threshold,
            min(settings.snapshot_bytes, limits.kv_bytes / 4),
            min(settings.snapshot_age_s, limits.kv_age_s / 4),
        )

    def due(self, messages: int, bytes_: float, age_s: float) -> bool:
        return messages >= self.messages or (
            messages > 0 and (bytes_ >= self.bytes or age_s >= self.age_s)
        )


class Snapshotter:
    """Restores at start; afterwards snapshots whenever this replica leads and one is due."""

    def __init__(
        self, bus: Bus, holdings: RankStates, feed: Feed, thresholds: SnapshotThresholds
    ) -> None:
        self._bus = bus
        self._holdings = holdings
        self._feed = feed
        self._thresholds = thresholds
        self._store = SnapshotStore(bus)
        self._label = holdings.shard.label
        self._since = time.monotonic()
        self._rewinds = feed.rewinds
        self.covered = 0
        self.written = 0
        self.failed = 0
        self.skipped = 0
        self.size = 0

    async def reset(self) -> None:
        """Forget everything that any replica of this index ever stored."""
        await self._store.clear()
        await self._bus.js.purge_stream(self._bus.subjects.kv_stream)
        log.warning("purged the KV stream and all snapshots")

    async def restore(self) -> tuple[int, float | None]:
        """Load the newest good snapshot of the stream as it is.

        Returns the sequence that it covers, 0 for none, and when that message was stored.
        """
        await self._drop_strangers()
        stream = await self._stream_made()
        for slot in await self._store.slots(self._label):
            started = time.monotonic()
            try:
                data = await self._store.read(slot)
                covered = await asyncio.to_thread(
                    restore, self._holdings, data, self._label, stream
                )
            except (SnapshotError, BusTimeout, TimeoutError) as error:
                self.skipped += 1
                self._holdings.reset()
                log.warning("skipped snapshot %s: %s", slot.name, cause(error))
                continue
            self.covered, self.size = covered, len(data)
            seconds = time.monotonic() - started
            log.info("restored %s up to message %d in %.2f s", slot.name, covered, seconds)
            return covered, slot.stored or None
        return 0, None

    async def _drop_strangers(self) -> None:
        """Remove the snapshots of a stream that was made anew, or rewound behind what they cover.

        They would pass for the newest, and the stream would be purged of what nothing covers.
        """
        stream = self._bus.subjects.kv_stream
        info = await self._bus.js.stream_info(stream)
        for slot in await self._store.slots(self._label):
            another = slot.made not in ("", str(info.created))
            another = another or slot.covered > info.state.last_seq
            if not another and slot.stored:
                another = await is_rewound(self._bus, stream, slot.covered, slot.stored)
            if another:
                self.skipped += 1
                log.warning("dropped snapshot %s: it covers messages that are gone", slot.name)
                await self._store.drop(slot)

    async def run(self, leads: Callable[[], bool]) -> None:
        """Snapshot for as long as the service lives; failures are logged and tried again."""
        failing = False
        while True:
            await asyncio.sleep(CHECK_S * (8 if failing else 1))
            if not ((self._due() or self._feed.rewinds != self._rewinds) and leads()):
                continue
            try:
                await self._note_rewinds()
                await self._note_others()
                if self._due():
                    await self.snapshot()
                failing = False
            except (BusError, SnapshotError, OSError, TimeoutError) as error:
                self.failed += 1
                if not failing:
                    log.warning("no snapshot, retrying: %s", cause(error))
                failing = True

    def _due(self) -> bool:
        feed = self._feed
        messages = feed.applied - self.covered
        size = messages * feed.bytes / max(feed.messages, 1)
        return self._thresholds.due(messages, size, time.monotonic() - self._since)

    async def _note_rewinds(self) -> None:
        """Of a stream that is another one now, no snapshot covers anything any more."""
        rewinds = self._feed.rewinds
        if rewinds != self._rewinds:
            await self._drop_strangers()
            self._note(0)
            self._rewinds = rewinds

    async def _note_others(self) -> None:
        """Another replica may have led, and written, until just now."""
        slots = await self._store.slots(self._label)
        if slots and self.covered < slots[0].covered <= self._feed.applied:
            self._note(slots[0].covered)

    def _note(self, covered: int) -> None:
        self.covered = covered
        self._since = time.monotonic()

    async def snapshot(self) -> None:
        """Write one, read it back, and purge what the one before it covers."""
        started = time.monotonic()
        covers = Covers(await self._stream_made(), self._feed.applied, self._feed.applied_stored)
        rewinds = self._feed.rewinds
        data = await self._pack(covers)
        if self._feed.rewinds != rewinds:
            raise SnapshotError("the stream was rewound meanwhile")
        covered = covers.seq
        await self._store.write(self._label, data, covers, VERSION)
        check(await self._store.read(await self._stored(covered)))
        self._note(covered)
        self.written += 1
        self.size = len(data)
        await self._purge()
        seconds = time.monotonic() - started
        log.info("snapshot up to message %d: %d bytes in %.2f s", covered, len(data), seconds)

    async def _stored(self, covered: int) -> Slot:
        """The snapshot just written; raises DamagedSnapshot if the server does not show it.

        An old leader may answer with what was there before, and another replica may clear all.
        """
        for slot in await self._store.slots(self._label):
            if slot.covered == covered:
                return slot
        raise DamagedSnapshot("it was stored and is not there")

    async def _pack(self, covers: Covers) -> bytes:
        packer = Packer()
        for image in capture(self._holdings):
            await asyncio.to_thread(packer.add, image)
        gone = self._holdings.lives.gone
        header = Header(self._label, covers.made, covers.seq, time.time(), gone)
        return await asyncio.to_thread(packer.finish, header)

    async def _purge(self) -> None:
        shard = self._holdings.shard
        labels = [shard.label_of(number) for number in range(shard.count)]
        covered = []
        for label in labels:
            slots = await self._store.slots(label)
            covered.append(slots[1].covered if len(slots) > 1 else 0)
        if min(covered) > 0:  # the covered message stays: it tells whether the stream is the same
            await self._bus.js.purge_stream(self._bus.subjects.kv_stream, seq=min(covered))
        await self._store.sweep()

    async def _stream_made(self) -> str:
        info = await self._bus.js.stream_info(self._bus.subjects.kv_stream)
        return str(info.created)
