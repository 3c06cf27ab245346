"""Blocks on their way to and from the store that all nodes share.

A store that fails is left alone for a while: nothing is looked up in it and nothing is put there,
and everything goes on without it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from kvmesh._native import xxh3
from kvmesh.kvbm.core.blocks.block import REMOTE, Copy
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd, wishes_of
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.kvbm.tiers.remote.interface import RemoteBlock, RemoteError, RemoteStore
from kvmesh.kvbm.tiers.remote.seal import Seal
from kvmesh.retention.claims import RetentionWish
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
AT_ONCE = 4
BATCH_BLOCKS = 32
FIRST_REST_S = 1.0
LAST_REST_S = 30.0
TEND_S = 60.0


class Note(Struct, frozen=True, array_like=True):
    """What goes with a block: its checksum, and level and seconds left of what is asked for it."""

    checksum: int
    wishes: list[tuple[int, float | None]] = []


T = TypeVar("T")
_note_decoder = msgspec.msgpack.Decoder(Note)
_encode = msgspec.msgpack.Encoder().encode
Ends = list[tuple[Move, MoveEnd]]


class RemoteMover:
    """Carries out moves to and from `store`, some at once."""

    def __init__(
        self,
        store: RemoteStore,
        arena: Arena,
        seal: Seal,
        moved: Callable[[Ends], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._arena = arena
        self._seal = seal
        self._moved = moved
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks = BackgroundTasks()
        self._rest_s = 0.0
        self._rests_until = 0.0
        self.errors = 0

    @property
    def rests(self) -> bool:
        """Whether the store has failed lately."""
        return self._clock() < self._rests_until

    def start(self, moves: Iterable[Move]) -> None:
        """Begin moves, all of which are told of in the end."""
        asked = list(moves)
        there = [move for move in asked if move.target.tier == REMOTE]
        here = [move for move in asked if move.source.tier == REMOTE]
        for batch in _batched(there):
            self._tasks.start(self._run(self._put, batch, MoveEnd.UNWRITABLE))
        for batch in _batched(here):
            self._tasks.start(self._run(self._get, batch, MoveEnd.UNREADABLE))

    async def find(self, digests: Sequence[bytes]) -> int:
        """How many leading ones are there, as far as is known."""
        return await self._guarded(self._store.find(digests)) or 0

    def drop(self, digests: Sequence[bytes]) -> None:
        """Have the store drop blocks."""
        if digests:
            self._tasks.start(self._drop(digests))

    async def tend(self) -> None:
        """Housekeeping, for ever."""
        while True:
            await asyncio.sleep(TEND_S)
            await self._guarded(self._store.tend())

    async def close(self) -> None:
        await self._tasks.close()
        await self._store.close()

    async def _run(
        self,
        carry: Callable[[Sequence[Move]], Coroutine[None, None, Ends]],
        batch: Sequence[Move],
        otherwise: MoveEnd,
    ) -> None:
        async with self._slots:
            ends = await self._guarded(carry(batch))
        self._moved(ends if ends is not None else [(move, otherwise) for move in batch])

    async def _put(self, batch: Sequence[Move]) -> Ends:
        notes = [self._note(move.source) for move in batch]
        packed = await asyncio.to_thread(self._pack, batch, notes)
        await self._store.put(packed)
        return [(move, MoveEnd.DONE) for move in batch]

    def _note(self, copy: Copy) -> bytes:
        wishes = [(wish.level, wish.ttl_s) for wish in wishes_of(copy, self._clock())]
        return _encode(Note(copy.checksum, wishes))

    def _pack(self, batch: Sequence[Move], notes: Sequence[bytes]) -> list[RemoteBlock]:
        packed = []
        for move, note in zip(batch, notes, strict=True):
            block = move.source.block
            view = self._arena.view(move.source.offset, block.space.block_bytes)
            packed.append(RemoteBlock(block.digest, self._seal.put(block.digest, note, view), view))
        return packed

    async def _get(self, batch: Sequence[Move]) -> Ends:
        # not straight into the arena: what a call that timed out writes late must harm nobody
        buffers = [bytearray(move.target.block.space.block_bytes) for move in batch]
        digests = [move.source.block.digest for move in batch]
        notes = await self._store.get(digests, [memoryview(buffer) for buffer in buffers])
        known = await asyncio.to_thread(lambda: list(map(self._check, digests, buffers, notes)))
        ends = list(map(self._take, batch, buffers, known))
        self.drop([m.source.block.digest for m, end in ends if end is MoveEnd.CORRUPT])
        return ends

    def _check(self, digest: bytes, content: bytearray, sealed: bytes | None) -> Note | MoveEnd:
        if sealed is None:
            return MoveEnd.UNREADABLE
        note = self._seal.take(digest, sealed, content)
        if note is None:
            return MoveEnd.CORRUPT
        try:
            known = _note_decoder.decode(note)
        except msgspec.MsgspecError:
            return MoveEnd.CORRUPT
        return known if xxh3(content) == known.checksum else MoveEnd.CORRUPT

    def _take(self, move: Move, content: bytearray, known: Note | MoveEnd) -> tuple[Move, MoveEnd]:
        if isinstance(known, MoveEnd):
            return move, known
        self._arena.view(move.target.offset, len(content))[:] = content
        move.source.checksum = known.checksum
        move.wishes.extend(RetentionWish(level, ttl_s) for level, ttl_s in known.wishes)
        return move, MoveEnd.DONE

    async def _drop(self, digests: Sequence[bytes]) -> None:
        async with self._slots:
            await self._guarded(self._store.drop(digests))

    async def _guarded(self, work: Coroutine[None, None, T]) -> T | None:
        """What the store answers; None if it fails, or has failed lately."""
        if self.rests:
            work.close()
            return None
        try:
            answer = await work
        except RemoteError as error:
            self._on_error(error)
            return None
        if self._rest_s:
            log.info("the remote tier answers again")
        self._rest_s = 0.0
        return answer

    def _on_error(self, error: RemoteError) -> None:
        self.errors += 1
        if not self._rest_s:
            log.warning("going on without the remote tier: %s", error)
        self._rest_s = min(LAST_REST_S, max(FIRST_REST_S, 2 * self._rest_s))
        self._rests_until = self._clock() + self._rest_s


def _batched(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    for start in range(0, len(moves), BATCH_BLOCKS):
        yield moves[start : start + BATCH_BLOCKS]
