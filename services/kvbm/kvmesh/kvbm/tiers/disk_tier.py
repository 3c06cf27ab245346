"""State of the disk tier across restarts: its journal, and the size of its file."""

import asyncio
import logging
from collections.abc import Callable

from kvmesh.kvbm.core.blocks.block import DISK, Copy
from kvmesh.kvbm.core.blocks.journal_record import Opened, Record, RecordEncoder, block_of, replay
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.tiers.disk_file import DiskError, DiskFile
from kvmesh.kvbm.tiers.disk_journal import DiskJournal, opened

log = logging.getLogger(__name__)
SLACK = 10_000


class DiskTier:
    """Records `manager`'s disk tier in a journal and resizes it to the free space."""

    def __init__(
        self, disk: DiskFile, manager: Manager, key: bytes, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._disk = disk
        self._clock = clock
        self._tier = manager.store.tiers[DISK]
        self._encoder = RecordEncoder()
        self._journal = DiskJournal(disk.path, opened(self._tier.slots.extent, key))
        self._failing = False
        self._saving = asyncio.Lock()

    async def open(self) -> None:
        """Restore the blocks in the journal; raises DiskError if it is unusable."""
        try:
            await self._open()
        except OSError as error:
            path, reason = self._journal.path, error.strerror or str(error)
            raise DiskError(f"cannot use {path}: {reason}; set kvbm.disk_path") from error

    async def _open(self) -> None:
        layouts, written = replay(await self._read())
        spaces = {
            number: self._manager.restored_space(found.model, found.layout)
            for number, found in layouts.items()
        }
        self._manager.store.begin(self._clock())
        restored = 0
        for record in written:
            space = spaces.get(record.layout)
            if space is not None and record.offset + space.slot_bytes <= self._disk.reserved:
                block = block_of(record, space)
                restored += self._manager.restore(block, record.offset, record.checksum)
        self._manager.store.drain_disk_changes()
        await self._rewrite()
        if written:
            log.info("restored %d of %d blocks on disk", restored, len(written))

    async def _read(self) -> list[Record]:
        """The journal's records; none if the tier's size does not suit their extent size."""
        records = await asyncio.to_thread(self._journal.read)
        found = records[0] if records else None
        if isinstance(found, Opened):
            if not self._tier.set_extent(found.extent):
                log.warning("the disk tier is far smaller or larger than it was: starting empty")
                return []
            self._journal.first = found
        return records

    async def fit(self) -> bool:
        """Resize the tier to the free space; return whether its size changed. Raises OSError."""
        slots = self._tier.slots
        size = slots.capacity
        usable = await asyncio.to_thread(self._disk.usable, size)
        changed = usable != size == slots.capacity
        if changed:
            dropped = self._manager.resize_disk(usable, self._clock())
            log.warning(
                "the disk tier is resized from %d to %d bytes; %d blocks dropped",
                size,
                usable,
                dropped,
            )
        if slots.capacity < self._disk.reserved:
            await asyncio.to_thread(self._disk.truncate, max(slots.capacity, slots.end))
        return changed

    def shrink(self, usable: int) -> None:
        """Limit the tier to the `usable` bytes beyond which the file cannot grow."""
        self._manager.resize_disk(min(usable, self._tier.slots.capacity), self._clock())

    async def save(self, last: bool = False) -> None:
        """Append the changes since the last call; the `last` call retries failed ones."""
        async with self._saving:
            changes = self._manager.store.drain_disk_changes()
            if changes or (last and self._failing):
                await self._save(changes)

    async def _save(self, changes: list[tuple[bool, Copy]]) -> None:
        records = self._encoder.changes(changes)
        live = len(self._tier.copies)
        try:
            if self._failing or self._journal.length + len(records) > 2 * live + SLACK:
                await self._rewrite()
            else:
                await asyncio.to_thread(self._journal.append, records)
            if self._failing:
                log.info("the journal is complete again")
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error(
                    "cannot write the journal, retrying; a restart before that "
                    "loses the blocks on disk: %s",
                    error,
                )
            self._failing = True

    async def close(self) -> None:
        await self.save(last=True)
        self._journal.close()

    async def _rewrite(self) -> None:
        records = self._encoder.snapshot(list(self._tier.copies.values()))
        await asyncio.to_thread(self._journal.rewrite, records)
