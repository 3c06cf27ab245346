"""Blocks in the arenas of other nodes: found through the index, read from memory to memory.

One message asks a peer to lend blocks; their bytes come by `kvmesh.transfer`.
"""

import asyncio
import logging
import struct
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress

import msgspec

from kvmesh._native import xxh3
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError
from kvmesh.bus.kvbm import Declined, Lend, Lent
from kvmesh.bus.messages import OverlapQuery, OverlapReply
from kvmesh.kvbm.core.blocks.block import Copy
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.kvbm.peers.claims_exchange import ClaimsExchange
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import Region, TransferError, Transport

log = logging.getLogger(__name__)
FIND_S = 0.5
LEND_S = 1.0
BATCH_BLOCKS = 128
MOST_KNOWN = 1 << 16
NOBODY = PeerSource("", 0)
Ends = list[tuple[Move, MoveEnd]]
_lends: "msgspec.msgpack.Decoder[Lent | Declined]" = msgspec.msgpack.Decoder(Lent | Declined)
_overlaps = msgspec.msgpack.Decoder(OverlapReply)


class PeerReader:
    """The other kvbms of the mesh. `hold` keeps a copy for good, whose memory is not safe."""

    def __init__(
        self,
        bus: Bus,
        neighbours: ClaimsExchange,
        arena: Arena,
        options: TransferSettings,
        moved: Callable[[Ends], None],
        hold: Callable[[Copy], object],
    ) -> None:
        self._bus = bus
        self._neighbours = neighbours
        self._arena = arena
        self._options = options
        self._moved = moved
        self._hold = hold
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._grants: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: Transport | None = None
        self._region: Region | None = None
        self._opening: asyncio.Task[None] | None = None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._transport is not None:
            await self._transport.close()

    # where blocks are

    async def find(self, lookup: Lookup, known: int) -> tuple[int, PeerSource | None]:
        """How many blocks of a lookup after the first `known` another node has in its arena.

        Behind those it may have some on its disk.
        """
        wanted = lookup.digests[known:]
        first = lookup.first + known
        if not wanted or self._region is None:
            return 0, None
        sequence = lookup.prompt.sequence_hashes[: first + len(wanted)].tobytes()
        arena, whole = await self._deepest(lookup, sequence)
        there = wanted[: max(0, arena.end - first)]
        self.note(there, arena.owner)
        return len(there), whole if whole.end > max(first, arena.end) else None

    def note(self, digests: Iterable[bytes], peer: str) -> None:
        """A peer has these in its arena."""
        for digest in digests:
            self._known[digest] = peer
            self._known.move_to_end(digest)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    async def _deepest(self, lookup: Lookup, sequence: bytes) -> tuple[PeerSource, PeerSource]:
        """Who has most leading blocks of a prompt in its arena, and who has most with its disk."""
        subject = self._bus.subjects.index(lookup.prompt.space.model)
        query = OverlapQuery([sequence], lookup.prompt.salt)
        try:
            reply = await self._bus.request(subject, query, _overlaps, FIND_S)
            rows = struct.iter_unpack("<5I", reply.rows[0] if reply.rows else b"")
            named = [(reply.ranks[rank].instance, a, d) for rank, _, a, d, _ in rows]
        except (BusError, struct.error, IndexError) as error:
            log.debug("the index does not say what peers have: %s", error)
            return NOBODY, NOBODY
        peers = self._neighbours.sharing(lookup.prompt.space)
        held = [(owner, arena, disk) for owner, arena, disk in named if owner in peers]
        arenas = (PeerSource(owner, arena) for owner, arena, _ in held)
        wholes = (PeerSource(owner, arena + disk) for owner, arena, disk in held)
        return max(arenas, key=_end, default=NOBODY), max(wholes, key=_end, default=NOBODY)

    # reading theirs

    def knows(self, digest: bytes) -> bool:
        """Whether a peer had it when it was last looked for, and is not left alone now."""
        peer = self._known.get(digest)
        return peer is not None and not self._neighbours.rests(peer)

    def start(self, moves: Iterable[Move]) -> None:
        """Begin moves of known blocks into the arena, all of which are told of in the end."""
        by_peer: defaultdict[tuple[str, int], list[Move]] = defaultdict(list)
        for move in moves:
            peer = self._known.pop(move.source.block.digest)
            by_peer[peer, move.source.block.space.block_bytes].append(move)
        for (peer, size), batch in by_peer.items():
            for at in range(0, len(batch), BATCH_BLOCKS):
                self._spawn(self._get(peer, size, batch[at : at + BATCH_BLOCKS]))

    async def _get(self, peer: str, size: int, batch: Sequence[Move]) -> None:
        sums = array("Q")
        try:
            sums = await self._read(peer, size, batch)
        except (BusError, OSError, TransferError, ValueError) as error:
            self._on_failure(peer, error, batch)
        ends = await asyncio.to_thread(self._checked, batch, sums, size)
        self._moved(ends)

    async def _read(self, peer: str, size: int, batch: Sequence[Move]) -> "array[int]":
        """Copy the peer's blocks into the arena; returns the checksums of those that came."""
        transport, region = self._transport, self._region
        digests = b"".join(move.source.block.digest for move in batch)
        subject = self._bus.subjects.kvbm(peer)
        lent = await self._bus.request(subject, Lend(digests, size), _lends, LEND_S)
        if isinstance(lent, Declined) or transport is None or region is None:
            return array("Q")
        offsets = array("Q", lent.offsets)
        if offsets:
            self._grants[peer] = lent.descriptor
            pieces = [
                (o, move.target.offset, size) for o, move in zip(offsets, batch, strict=False)
            ]
            await transport.read(lent.descriptor, region, pieces, self._options.timeout_s)
        return array("Q", lent.checksums)

    def _checked(self, batch: Sequence[Move], sums: "array[int]", size: int) -> Ends:
        ends: Ends = []
        for place, move in enumerate(batch):
            end = MoveEnd.UNREADABLE
            if place < len(sums):
                good = xxh3(self._arena.view(move.target.offset, size)) == sums[place]
                move.source.checksum = sums[place]
                end = MoveEnd.DONE if good else MoveEnd.CORRUPT
            ends.append((move, end))
        return ends

    def leave(self, peer: str) -> None:
        """It is gone."""
        descriptor = self._grants.pop(peer, None)
        if descriptor is not None and self._transport is not None:
            with suppress(TransferError):  # what was no grant has left nothing behind
                self._transport.forget(descriptor)

    def _on_failure(self, peer: str, error: Exception, batch: Sequence[Move]) -> None:
        self._neighbours.rest(peer, error)
        if isinstance(error, TransferError) and not error.settled:
            log.error("%d blocks of memory are not used again", len(batch))
            for move in batch:
                self._hold(move.target)

    # lending

    @property
    def region(self) -> Region | None:
        """The arena, once there is somebody to lend it to."""
        return self._region

    def begin(self) -> None:
        """There is somebody."""
        if self._opening is None:
            self._opening = self._spawn(self._open_transport())

    @property
    def opening(self) -> bool:
        """Whether there will be a region soon, or never."""
        return self._opening is None or not self._opening.done()

    async def _open_transport(self) -> None:
        try:
            self._transport = await Transport.open(self._options)
            self._region = self._transport.register(self._arena.map)
        except TransferError as error:
            log.warning("no blocks are read from other nodes: %s", error)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _end(further: PeerSource) -> int:
    return further.end
