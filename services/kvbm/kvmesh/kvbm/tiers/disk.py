"""The local disk of a node: file, journal, mover and their periodic work behind one interface."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.kvbm.tiers.disk_file import DiskFile
from kvmesh.kvbm.tiers.disk_mover import DiskMover
from kvmesh.kvbm.tiers.disk_tier import DiskTier

log = logging.getLogger(__name__)
SAVE_S = 0.1
FIT_S = 2.0
THREADS = 4  # concurrent reads and writes


class LocalDisk:
    """Disk tier of `manager` in `file`; reports moves to `on_moved`."""

    def __init__(
        self,
        file: DiskFile,
        arena: Arena,
        manager: Manager,
        key: bytes,
        clock: Callable[[], float],
        on_moved: Callable[[list[tuple[Move, MoveEnd]]], None],
    ) -> None:
        self._tier = DiskTier(file, manager, key, clock)
        self._mover = DiskMover(
            arena, file, THREADS, on_moved, self._tier.shrink, manager.give_up_disk
        )
        self._closed = False

    async def open(self) -> None:
        """Restore the blocks on disk; raises DiskError."""
        await self._tier.open()

    def start(self, moves: Iterable[Move]) -> None:
        """Start moves between arena and disk."""
        self._mover.start(moves)

    async def save_periodically(self) -> None:
        while not self._closed:
            await asyncio.sleep(SAVE_S)
            if not self._closed:
                await self._tier.save()

    async def fit_periodically(self, on_resized: Callable[[], Awaitable[None]]) -> None:
        """Keep the tier as large as the free space allows; await `on_resized` after changes."""
        while not self._closed:
            try:
                if await self._tier.fit():
                    await on_resized()
            except OSError as error:
                log.warning("cannot determine the free disk space: %s", error)
            await asyncio.sleep(FIT_S)

    async def close(self) -> None:
        """Return once no move runs and the journal is complete."""
        await self._mover.close()
        self._closed = True
        await self._tier.close()


class NoDisk:
    """A node without a disk tier."""

    async def open(self) -> None:
        pass

    def start(self, moves: Iterable[Move]) -> None:
        pass

    async def save_periodically(self) -> None:
        pass

    async def fit_periodically(self, on_resized: Callable[[], Awaitable[None]]) -> None:
        pass

    async def close(self) -> None:
        pass
