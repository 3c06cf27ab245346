"""Writes snapshots of the index and purges the part of the KV stream that they cover.

The stream is purged up to the snapshot before the newest, so that a damaged newest snapshot only
costs a longer replay.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, BusTimeout, cause
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.streams.identity import is_rewound
from kvmesh.bus.streams.keeper import keeper_of
from kvmesh.bus.ticks import next_tick
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
CHECK_S = 1.0
SNAPSHOT_BYTES = 1 << 30  # bounds the events that a restarted replica reads anew


@dataclass(frozen=True)
class SnapshotThresholds:
    """Thresholds of a due snapshot: messages, bytes and age that no snapshot covers."""

    messages: int
    bytes: float
    age_s: float

    @classmethod
    def of(cls, settings: IndexerSettings, limits: StreamLimits) -> "SnapshotThresholds":
        """The settings, capped at a quarter of the limits at which the stream drops messages."""
        return cls(
            settings.snapshot_threshold,
            min(SNAPSHOT_BYTES, limits.kv_bytes / 4),
            min(settings.snapshot_age_s, limits.kv_age_s / 4),
        )

    def due(self, messages: int, bytes_: float, age_s: float) -> bool:
        return messages >= self.messages or (
            messages > 0 and (bytes_ >= self.bytes or age_s >= self.age_s)
        )


@dataclass(slots=True)
class SnapshotCounts:
    """Totals since the start, by metric name."""

    snapshots: int = 0
    snapshot_failures: int = 0
    snapshots_skipped: int = 0


class Snapshotter:
    """Restores at start; then writes a snapshot whenever one is due and this replica leads."""

    def __init__(
        self, bus: Bus, states: RankStates, feed: Feed, thresholds: SnapshotThresholds
    ) -> None:
        self._bus = bus
        self._states = states
        self._feed = feed
        self._thresholds = thresholds
        self._store = SnapshotStore(bus)
        self._label = states.shard.label
        self._since = time.monotonic()
        self._rewinds = feed.rewinds
        self._lost = False
        self.covered = 0
        self.counts = SnapshotCounts()
        self.size = 0
        keeper_of(bus).restore("snapshots of the index", self._note_loss)

    async def reset(self) -> None:
        """Delete all snapshots, of every shard, and purge the KV stream."""
        await self._store.clear()
        await self._bus.js.purge_stream(self._bus.subjects.kv_stream)
        log.warning("purged the KV stream and all snapshots")

    async def restore(self) -> tuple[int, float | None]:
        """Load the newest usable snapshot of the present stream.

        Returns the sequence it covers (0: none) and the time at which that message was stored.
        """
        await self._drop_foreign()
        stream = await self._stream_created()
        for slot in await self._store.slots(self._label):
            started = time.monotonic()
            try:
                data = await self._store.read(slot)
                covered = await asyncio.to_thread(restore, self._states, data, self._label, stream)
            except (SnapshotError, BusTimeout, TimeoutError) as error:
                self.counts.snapshots_skipped += 1
                self._states.reset()
                log.warning("skipped snapshot %s: %s", slot.name, cause(error))
                continue
            self.covered, self.size = covered, len(data)
            seconds = time.monotonic() - started
            log.info("restored %s up to message %d in %.2f s", slot.name, covered, seconds)
            return covered, slot.stored or None
        return 0, None

    async def _drop_foreign(self) -> None:
        """Delete snapshots of a replaced stream, or of one rewound behind what they cover.

        Such a snapshot would count as the newest one, and uncovered messages would be purged.
        """
        stream = self._bus.subjects.kv_stream
        info = await self._bus.js.stream_info(stream)
        for slot in await self._store.slots(self._label):
            foreign = slot.stream_created not in ("", str(info.created))
            foreign = foreign or slot.covered > info.state.last_seq
            if not foreign and slot.stored:
                foreign = await is_rewound(self._bus, stream, slot.covered, slot.stored)
            if foreign:
                self.counts.snapshots_skipped += 1
                log.warning("dropped snapshot %s: it covers messages that are gone", slot.name)
                await self._store.drop(slot)

    async def run(self, leads: Callable[[], bool]) -> None:
        """Write due snapshots until cancelled; failures are logged and retried."""
        failing = False
        while True:
            await next_tick(CHECK_S * (2 if failing else 1))
            if not ((self._due() or self._feed.rewinds != self._rewinds) and leads()):
                continue
            try:
                await self._note_rewinds()
                await self._note_others()
                if self._due():
                    await self.snapshot()
                failing = False
            except (BusError, SnapshotError, OSError, TimeoutError) as error:
                self.counts.snapshot_failures += 1
                if not failing:
                    log.warning("no snapshot, retrying: %s", cause(error))
                failing = True

    def _due(self) -> bool:
        feed = self._feed
        messages = feed.applied - self.covered
        size = messages * feed.bytes / max(feed.counts.messages, 1)
        if self._lost and messages > 0:
            return True
        return self._thresholds.due(messages, size, time.monotonic() - self._since)

    async def _note_rewinds(self) -> None:
        """After a rewind of the stream, drop the snapshots that cover lost messages."""
        rewinds = self._feed.rewinds
        if rewinds != self._rewinds:
            await self._drop_foreign()
            self._note(0)
            self._rewinds = rewinds

    async def _note_others(self) -> None:
        """Count the snapshots of another replica that led until now."""
        slots = await self._store.slots(self._label)
        if slots and self.covered < slots[0].covered <= self._feed.applied:
            self._note(slots[0].covered)

    async def _note_loss(self) -> None:
        """Without a snapshot, what was purged from the stream would cost a dump of all workers."""
        if self.covered and not await self._store.slots(self._label):
            log.warning("the snapshots of the index are gone: writing another one")
            self._note(0)
            self._lost = True

    def _note(self, covered: int) -> None:
        self.covered = covered
        self._since = time.monotonic()

    async def snapshot(self) -> None:
        """Write a snapshot, verify it by reading it back, purge what the previous one covers."""
        started = time.monotonic()
        covers = Covers(await self._stream_created(), self._feed.applied, self._feed.applied_stored)
        rewinds = self._feed.rewinds
        data = await self._pack(covers)
        if self._feed.rewinds != rewinds:
            raise SnapshotError("the stream was rewound meanwhile")
        covered = covers.seq
        await self._store.write(self._label, data, covers, VERSION)
        check(await self._store.read(await self._find_stored(covered)))
        self._note(covered)
        self._lost = False
        self.counts.snapshots += 1
        self.size = len(data)
        await self._purge()
        seconds = time.monotonic() - started
        log.info("snapshot up to message %d: %d bytes in %.2f s", covered, len(data), seconds)

    async def _find_stored(self, covered: int) -> Slot:
        """The snapshot just written; raises DamagedSnapshot if the server does not list it.

        A deposed NATS leader may reply with an older state, and another replica may clear all.
        """
        for slot in await self._store.slots(self._label):
            if slot.covered == covered:
                return slot
        raise DamagedSnapshot("it was stored but is not listed")

    async def _pack(self, covers: Covers) -> bytes:
        packer = Packer()
        for image in capture(self._states):
            await asyncio.to_thread(packer.add, image)
        ignored = self._states.incarnations.ignored
        header = Header(self._label, covers.stream_created, covers.seq, time.time(), ignored)
        return await asyncio.to_thread(packer.finish, header)

    async def _purge(self) -> None:
        shard = self._states.shard
        labels = [shard.label_of(number) for number in range(shard.count)]
        covered = []
        for label in labels:
            slots = await self._store.slots(label)
            covered.append(slots[1].covered if len(slots) > 1 else 0)
        if min(covered) > 0:  # the covered message stays: it identifies the stream
            await self._bus.js.purge_stream(self._bus.subjects.kv_stream, seq=min(covered))
        await self._store.sweep()

    async def _stream_created(self) -> str:
        info = await self._bus.js.stream_info(self._bus.subjects.kv_stream)
        return str(info.created)
