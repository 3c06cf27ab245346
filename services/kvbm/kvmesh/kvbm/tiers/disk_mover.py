"""Blocks on their way between tiers: neighbours together, in threads, a bounded number at once."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from kvmesh._native import xxh3
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, Copy
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.kvbm.tiers.disk_file import DiskFile, DiskFull

log = logging.getLogger(__name__)
RUN_BYTES = 4 << 20
TOLERATED = 3


class DiskMover:
    """Carries out moves between arena and disk, and tells `done` in the loop's thread.

    `shrink` is called when the disk turns out to have fewer bytes, `give_up` when it fails again
    and again.
    """

    def __init__(
        self,
        arena: Arena,
        disk: DiskFile,
        threads: int,
        done: Callable[[list[tuple[Move, MoveEnd]]], None],
        shrink: Callable[[int], None],
        give_up: Callable[[], None],
    ) -> None:
        self._arena = arena
        self._disk = disk
        self._done = done
        self._shrink = shrink
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(threads, "disk")
        self._failures = 0
        self._full = False

    def start(self, moves: Iterable[Move]) -> None:
        """Begin moves, all of which are told of in the end."""
        for batch in _runs(moves):
            self._threads.submit(self._run, batch)

    async def close(self) -> None:
        """Return once nothing is read or written any more; what has not begun is not told."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _run(self, batch: list[Move]) -> None:
        try:
            ends = self._write(batch) if batch[0].target.tier == DISK else self._read(batch)
        except DiskFull as error:
            ends = [MoveEnd.UNWRITABLE] * len(batch)
            self._tell(self._on_full, error)
        except Exception as error:  # its copies must be let go of, whatever it is
            writes = batch[0].target.tier == DISK
            ends = [MoveEnd.UNWRITABLE if writes else MoveEnd.UNREADABLE] * len(batch)
            self._tell(self._on_error, error)
        self._tell(self._done, list(zip(batch, ends, strict=True)))

    def _write(self, batch: list[Move]) -> list[MoveEnd]:
        self._disk.write(batch[0].target.offset, self._views(move.source for move in batch))
        return [MoveEnd.DONE] * len(batch)

    def _read(self, batch: list[Move]) -> list[MoveEnd]:
        self._disk.read(batch[0].source.offset, self._views(move.target for move in batch))
        return [self._checked(move) for move in batch]

    def _checked(self, move: Move) -> MoveEnd:
        size = move.target.block.space.block_bytes
        found = xxh3(self._arena.view(move.target.offset, size))
        return MoveEnd.DONE if found == move.source.checksum else MoveEnd.CORRUPT

    def _views(self, copies: Iterable[Copy]) -> list[memoryview]:
        return [self._arena.view(copy.offset, copy.block.space.slot) for copy in copies]

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    def _on_full(self, error: DiskFull) -> None:
        self._shrink(error.usable)
        if not self._full:
            self._full = True
            log.warning("the disk tier stays at %d bytes: %s", error.usable, error)

    def _on_error(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            defect = None if isinstance(error, OSError) else error
            log.error("the disk tier fails: %s", error, exc_info=defect)
        if self._failures == TOLERATED:
            log.error("the disk tier is given up after %d errors", TOLERATED)
            self._give_up()


def _runs(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Moves of one direction whose places on disk are neighbours, up to RUN_BYTES together."""
    ordered = sorted(moves, key=lambda move: (move.target.tier, _on_disk(move)))
    for _, same in groupby(ordered, key=lambda move: move.target.tier):
        yield from _neighbours(list(same))


def _neighbours(moves: Sequence[Move]) -> Iterator[list[Move]]:
    run: list[Move] = []
    end = size = 0
    for move in moves:
        slot, place = move.source.block.space.slot, _on_disk(move)
        if run and (place != end or size + slot > RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(move)
        size += slot
        end = place + slot
    if run:
        yield run


def _on_disk(move: Move) -> int:
    return move.source.offset if move.target.tier == ARENA else move.target.offset
