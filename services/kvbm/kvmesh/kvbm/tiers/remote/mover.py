"""Moves to and from the store that all nodes share.

After a failure the store is not used for a while, and the node continues without it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from kvmesh._native import xxh3
from kvmesh.bus.messages import MessageDecoder
from kvmesh.kvbm.core.blocks.block import REMOTE, Copy
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd, carried_wishes
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.kvbm.tiers.remote.interface import RemoteBlock, RemoteError, RemoteStore
from kvmesh.kvbm.tiers.remote.seal import Seal
from kvmesh.retention.claims import RetentionWish
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
MAX_CALLS = 4
BATCH_BLOCKS = 32
MIN_REST_S = 1.0
MAX_REST_S = 30.0
TEND_S = 60.0
MAX_DOOMED = 1 << 20


class Note(Struct, frozen=True, array_like=True):
    """Stored with a block: its checksum, and level and seconds left of its retention wishes."""

    checksum: int
    wishes: list[tuple[int, float | None]] = []


T = TypeVar("T")
_note_decoder = MessageDecoder(Note)
_encode = msgspec.msgpack.Encoder().encode
Ends = list[tuple[Move, MoveEnd]]


class RemoteMover:
    """Carries out moves to and from `store`, at most MAX_CALLS batches at a time.

    Blocks that are to be dropped are not found any more, even while the store fails to drop them.
    """

    def __init__(
        self,
        store: RemoteStore,
        arena: Arena,
        seal: Seal,
        on_moved: Callable[[Ends], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._arena = arena
        self._seal = seal
        self._on_moved = on_moved
        self._clock = clock
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._tasks = BackgroundTasks()
        self._rest_s = 0.0
        self._paused_until = 0.0
        self._doomed: dict[bytes, None] = {}
        self.errors = 0

    @property
    def paused(self) -> bool:
        """True if the store has failed recently and is not used."""
        return self._clock() < self._paused_until

    def start(self, moves: Iterable[Move]) -> None:
        """Start moves, each of which is reported to `on_moved`."""
        pending = list(moves)
        writes = [move for move in pending if move.target.tier == REMOTE]
        reads = [move for move in pending if move.source.tier == REMOTE]
        for batch in _batched(writes):
            self._tasks.start(self._run(self._put, batch, MoveEnd.UNWRITABLE))
        for batch in _batched(reads):
            self._tasks.start(self._run(self._get, batch, MoveEnd.UNREADABLE))

    async def find(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks in the store; 0 if it fails."""
        doomed = (index for index, digest in enumerate(digests) if digest in self._doomed)
        found = digests[: next(doomed, len(digests))]
        return await self._guarded(self._store.find(found)) or 0

    def drop(self, digests: Sequence[bytes]) -> None:
        """Drop blocks from the store, now or once it works again."""
        if digests:
            self._doomed.update(dict.fromkeys(digests))
            while len(self._doomed) > MAX_DOOMED:
                del self._doomed[next(iter(self._doomed))]
            self._tasks.start(self._drop())

    async def is_empty(self) -> bool:
        """True if the store has no blocks; False if it fails."""
        return await self._guarded(self._store.is_empty()) or False

    async def undropped(self, timeout_s: float) -> int:
        """The number of blocks that the store still has to drop, once all is done or time is up."""
        for _ in range(2):  # a block that is being written is dropped after that
            await self._tasks.wait(timeout_s / 2)
        return len(self._doomed)

    async def tend(self) -> None:
        """Run the store's housekeeping periodically until cancelled."""
        while True:
            await asyncio.sleep(TEND_S)
            await self._guarded(self._store.tend())
            if self._doomed:
                await self._drop()

    async def close(self) -> None:
        await self._tasks.close()
        await self._store.close()

    async def _run(
        self,
        transfer: Callable[[Sequence[Move]], Coroutine[None, None, Ends]],
        batch: Sequence[Move],
        on_failure: MoveEnd,
    ) -> None:
        async with self._slots:
            ends = await self._guarded(transfer(batch))
        self._on_moved(ends if ends is not None else [(move, on_failure) for move in batch])

    async def _put(self, batch: Sequence[Move]) -> Ends:
        notes = [self._note(move.source) for move in batch]
        packed = await asyncio.to_thread(self._pack, batch, notes)
        await self._store.put(packed)
        for block in packed:
            self._doomed.pop(block.digest, None)
        return [(move, MoveEnd.DONE) for move in batch]

    def _note(self, copy: Copy) -> bytes:
        wishes = [(wish.level, wish.ttl_s) for wish in carried_wishes(copy, self._clock())]
        return _encode(Note(copy.checksum, wishes))

    def _pack(self, batch: Sequence[Move], notes: Sequence[bytes]) -> list[RemoteBlock]:
        packed = []
        for move, note in zip(batch, notes, strict=True):
            block = move.source.block
            view = self._arena.view(move.source.offset, block.space.block_bytes)
            packed.append(
                RemoteBlock(block.digest, self._seal.seal(block.digest, note, view), view)
            )
        return packed

    async def _get(self, batch: Sequence[Move]) -> Ends:
        # not directly into the arena: a call may still write after its timeout
        buffers = [bytearray(move.target.block.space.block_bytes) for move in batch]
        digests = [move.source.block.digest for move in batch]
        notes = await self._store.get(digests, [memoryview(buffer) for buffer in buffers])
        results = await asyncio.to_thread(lambda: list(map(self._verify, digests, buffers, notes)))
        ends = list(map(self._accept, batch, buffers, results))
        self.drop([m.source.block.digest for m, end in ends if end is MoveEnd.CORRUPT])
        return ends

    def _verify(self, digest: bytes, content: bytearray, sealed: bytes | None) -> Note | MoveEnd:
        if sealed is None:
            return MoveEnd.UNREADABLE
        note = self._seal.open(digest, sealed, content)
        if note is None:
            return MoveEnd.CORRUPT
        try:
            decoded = _note_decoder.decode(note)
        except msgspec.MsgspecError:
            return MoveEnd.CORRUPT
        return decoded if xxh3(content) == decoded.checksum else MoveEnd.CORRUPT

    def _accept(
        self, move: Move, content: bytearray, result: Note | MoveEnd
    ) -> tuple[Move, MoveEnd]:
        if isinstance(result, MoveEnd):
            return move, result
        self._arena.view(move.target.offset, len(content))[:] = content
        move.source.checksum = result.checksum
        move.wishes.extend(RetentionWish(level, ttl_s) for level, ttl_s in result.wishes)
        return move, MoveEnd.DONE

    async def _drop(self) -> None:
        async with self._slots:
            if digests := list(self._doomed):
                await self._guarded(self._drop_all(digests))

    async def _drop_all(self, digests: Sequence[bytes]) -> None:
        await self._store.drop(digests)
        for digest in digests:
            self._doomed.pop(digest, None)

    async def _guarded(self, work: Coroutine[None, None, T]) -> T | None:
        """The store's reply; None if it fails or is paused."""
        if self.paused:
            work.close()
            return None
        try:
            reply = await work
        except RemoteError as error:
            self.errors += 1
            if not self._rest_s:
                log.warning("continuing without the remote tier: %s", error)
            self._rest_s = min(MAX_REST_S, max(MIN_REST_S, 2 * self._rest_s))
            self._paused_until = self._clock() + self._rest_s
            return None
        if self._rest_s:
            log.info("the remote tier works again")
        self._rest_s = 0.0
        return reply


class NoRemote:
    """A node without a remote store: every move fails as unreadable."""

    def __init__(self, on_moved: Callable[[Ends], None]) -> None:
        self._on_moved = on_moved

    def start(self, moves: Sequence[Move]) -> None:
        if moves:
            self._on_moved([(move, MoveEnd.UNREADABLE) for move in moves])

    async def find(self, digests: Sequence[bytes]) -> int:
        return 0

    def drop(self, digests: Sequence[bytes]) -> None:
        pass

    async def is_empty(self) -> bool:
        return True

    async def undropped(self, timeout_s: float) -> int:
        return 0

    async def tend(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _batched(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    for start in range(0, len(moves), BATCH_BLOCKS):
        yield moves[start : start + BATCH_BLOCKS]
