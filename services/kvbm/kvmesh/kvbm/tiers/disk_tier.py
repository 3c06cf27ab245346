"""The disk tier of a kvbm: its file, its journal, and what both say after a restart."""

import asyncio
import logging
from collections.abc import Callable

from kvmesh.kvbm.core.blocks.block import DISK, Copy
from kvmesh.kvbm.core.blocks.journal_record import Bookkeeper, Opened, Record, block_of, surviving
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.tiers.disk_file import DiskError, DiskFile
from kvmesh.kvbm.tiers.disk_journal import DiskJournal, opened

log = logging.getLogger(__name__)
SLACK = 10_000


class DiskTier:
    """Keeps the journal of `manager`'s disk tier."""

    def __init__(
        self, disk: DiskFile, manager: Manager, key: bytes, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._disk = disk
        self._clock = clock
        self._tier = manager.store.tiers[DISK]
        self._books = Bookkeeper()
        self._journal = DiskJournal(disk.path, opened(self._tier.slots.extent, key))
        self._failing = False
        self._saving = asyncio.Lock()

    async def open(self) -> None:
        """Take in the blocks that are still there; raises DiskError if the journal is unusable."""
        try:
            await self._open()
        except OSError as error:
            path, reason = self._journal.path, error.strerror or str(error)
            raise DiskError(f"cannot use {path}: {reason}; set kvbm.disk_path") from error

    async def _open(self) -> None:
        layouts, kept = surviving(await self._read())
        spaces = {
            number: self._manager.restored_space(found.model, found.layout)
            for number, found in layouts.items()
        }
        self._manager.store.begin(self._clock())
        restored = 0
        for record in kept:
            space = spaces.get(record.layout)
            if space is not None and record.offset + space.slot <= self._disk.reserved:
                block = block_of(record, space)
                restored += self._manager.restore(block, record.offset, record.checksum)
        self._manager.store.take_kept()
        await self._rewrite()
        if kept:
            log.info("%d of %d blocks on disk are used again", restored, len(kept))

    async def _read(self) -> list[Record]:
        """What the journal says, if the tier can be divided as it was then."""
        records = await asyncio.to_thread(self._journal.read)
        found = records[0] if records else None
        if isinstance(found, Opened):
            if not self._tier.divide(found.extent):
                log.warning("the disk tier is far smaller or larger than it was: starting empty")
                return []
            self._journal.first = found
        return records

    async def fit(self) -> bool:
        """Leave others the space that they need, or take it again; whether the size is another.

        Raises OSError.
        """
        slots = self._tier.slots
        size = slots.capacity
        room = await asyncio.to_thread(self._disk.room, size)
        changes = room != size == slots.capacity
        if changes:
            gone = self._manager.resize_disk(room, self._clock())
            log.warning(
                "the disk tier goes from %d to %d bytes; %d blocks are dropped", size, room, gone
            )
        if slots.capacity < self._disk.reserved:
            await asyncio.to_thread(self._disk.cut, max(slots.capacity, slots.end))
        return changes

    def shrink(self, usable: int) -> None:
        """The file cannot grow beyond `usable` bytes."""
        self._manager.resize_disk(min(usable, self._tier.slots.capacity), self._clock())

    async def save(self, last: bool = False) -> None:
        """Write down what has changed since the last call; the `last` one, what could not be."""
        async with self._saving:
            changes = self._manager.store.take_kept()
            if changes or (last and self._failing):
                await self._save(changes)

    async def _save(self, changes: list[tuple[bool, Copy]]) -> None:
        records = self._books.changes(changes)
        live = len(self._tier.copies)
        try:
            if self._failing or self._journal.length + len(records) > 2 * live + SLACK:
                await self._rewrite()
            else:
                await asyncio.to_thread(self._journal.append, records)
            if self._failing:
                log.info("the journal is whole again")
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error(
                    "cannot write the journal, retrying; until it can be, "
                    "a restart loses what is on disk: %s",
                    error,
                )
            self._failing = True

    async def close(self) -> None:
        await self.save(last=True)
        self._journal.close()

    async def _rewrite(self) -> None:
        records = self._books.whole(list(self._tier.copies.values()))
        await asyncio.to_thread(self._journal.rewrite, records)
