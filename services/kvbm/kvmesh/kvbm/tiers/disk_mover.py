"""Moves between arena and disk, in a bounded number of threads, consecutive slots together."""

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
MAX_FAILURES = 3


class DiskMover:
    """Carries out moves between arena and disk; calls its callbacks in the loop's thread.

    Calls `on_moved` with results, `shrink` with the usable bytes when the disk is full, and
    `give_up` after MAX_FAILURES errors.
    """

    def __init__(
        self,
        arena: Arena,
        disk: DiskFile,
        threads: int,
        on_moved: Callable[[list[tuple[Move, MoveEnd]]], None],
        shrink: Callable[[int], None],
        give_up: Callable[[], None],
    ) -> None:
        self._arena = arena
        self._disk = disk
        self._on_moved = on_moved
        self._shrink = shrink
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(threads, "disk")
        self._failures = 0
        self._full = False

    def start(self, moves: Iterable[Move]) -> None:
        """Start moves, each of which is reported to `on_moved`."""
        for batch in _runs(moves):
            self._threads.submit(self._run, batch)

    async def close(self) -> None:
        """Return once no move runs; moves that have not started are not reported."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _run(self, batch: list[Move]) -> None:
        try:
            ends = self._write(batch) if batch[0].target.tier == DISK else self._read(batch)
        except DiskFull as error:
            ends = [MoveEnd.UNWRITABLE] * len(batch)
            self._call(self._on_full, error)
        except Exception as error:  # the copies must be released after any error
            writes = batch[0].target.tier == DISK
            ends = [MoveEnd.UNWRITABLE if writes else MoveEnd.UNREADABLE] * len(batch)
            self._call(self._on_error, error)
        self._call(self._on_moved, list(zip(batch, ends, strict=True)))

    def _write(self, batch: list[Move]) -> list[MoveEnd]:
        self._disk.write(batch[0].target.offset, self._views(move.source for move in batch))
        return [MoveEnd.DONE] * len(batch)

    def _read(self, batch: list[Move]) -> list[MoveEnd]:
        self._disk.read(batch[0].source.offset, self._views(move.target for move in batch))
        return [self._verified(move) for move in batch]

    def _verified(self, move: Move) -> MoveEnd:
        size = move.target.block.space.block_bytes
        found = xxh3(self._arena.view(move.target.offset, size))
        return MoveEnd.DONE if found == move.source.checksum else MoveEnd.CORRUPT

    def _views(self, copies: Iterable[Copy]) -> list[memoryview]:
        return [self._arena.view(copy.offset, copy.block.space.slot_bytes) for copy in copies]

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
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
            log.error("the disk tier failed: %s", error, exc_info=defect)
        if self._failures == MAX_FAILURES:
            log.error("no more writes to the disk tier after %d errors", MAX_FAILURES)
            self._give_up()


def _runs(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Runs of moves in one direction at consecutive disk offsets, up to RUN_BYTES each."""
    ordered = sorted(moves, key=lambda move: (move.target.tier, _disk_offset(move)))
    for _, same in groupby(ordered, key=lambda move: move.target.tier):
        yield from _consecutive(list(same))


def _consecutive(moves: Sequence[Move]) -> Iterator[list[Move]]:
    run: list[Move] = []
    end = size = 0
    for move in moves:
        slot_bytes, offset = move.source.block.space.slot_bytes, _disk_offset(move)
        if run and (offset != end or size + slot_bytes > RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(move)
        size += slot_bytes
        end = offset + slot_bytes
    if run:
        yield run


def _disk_offset(move: Move) -> int:
    return move.source.offset if move.target.tier == ARENA else move.target.offset
