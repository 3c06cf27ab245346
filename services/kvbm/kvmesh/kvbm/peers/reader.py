"""Reading side of peers: finds blocks in other nodes' arenas by the index, and reads them.

One message requests a loan of blocks; `kvmesh.transfer` copies their bytes from arena to arena.
"""

import asyncio
import logging
import struct
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvmesh._native import xxh3
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Declined, Lend, Lent, MessageDecoder, OverlapQuery, OverlapReply
from kvmesh.index import unpack_rows
from kvmesh.kvbm.core.blocks.block import Copy
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.kvbm.peers.claims_exchange import ClaimsExchange
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import Region, TransferError, Transport

log = logging.getLogger(__name__)
FIND_S = 0.5
LEND_S = 1.0
BATCH_BLOCKS = 128
MAX_HOLDERS = 1 << 16
NO_SOURCE = PeerSource("", 0)
Ends = list[tuple[Move, MoveEnd]]
_lends: MessageDecoder[Lent | Declined] = MessageDecoder(Lent | Declined)
_overlaps = MessageDecoder(OverlapReply)


class PeerHolder(NamedTuple):
    """A peer with a block, and the `traceparent` of the traced request that looked it up."""

    peer: str
    traceparent: str = ""


class PeerReader:
    """Reads blocks of other kvbms into the arena and reports moves to `on_moved`.

    `hold` withdraws a copy from use whose memory a failed transfer might still write.
    """

    def __init__(
        self,
        bus: Bus,
        exchange: ClaimsExchange,
        arena: Arena,
        options: TransferSettings,
        on_moved: Callable[[Ends], None],
        hold: Callable[[Copy], object],
    ) -> None:
        self._bus = bus
        self._exchange = exchange
        self._arena = arena
        self._options = options
        self._on_moved = on_moved
        self._hold = hold
        self._holders: OrderedDict[bytes, PeerHolder] = OrderedDict()
        self._grants: dict[str, bytes] = {}
        self._tasks = BackgroundTasks()
        self._transport: Transport | None = None
        self._region: Region | None = None
        self._opening: asyncio.Task[None] | None = None

    async def close(self) -> None:
        await self._tasks.close()
        if self._transport is not None:
            await self._transport.close()

    # lookup

    async def find(self, lookup: Lookup, known: int) -> tuple[int, PeerSource | None]:
        """Number of a lookup's blocks, after the first `known`, in one peer's arena.

        Also returns the peer with the longest prefix in arena and disk, if that prefix is longer.
        """
        wanted = lookup.digests[known:]
        first = lookup.first + known
        if not wanted or self._region is None:
            return 0, None
        sequence_hashes = lookup.prompt.sequence_hashes[: first + len(wanted)].tobytes()
        in_arena, in_all = await self._longest_prefixes(lookup, sequence_hashes)
        readable = wanted[: max(0, in_arena.end - first)]
        self.add_holder(readable, in_arena.instance, lookup.prompt.traceparent)
        return len(readable), in_all if in_all.end > max(first, in_arena.end) else None

    def add_holder(self, digests: Iterable[bytes], peer: str, traceparent: str = "") -> None:
        """Record that a peer has these blocks in its arena; a traced request looked them up."""
        holder = PeerHolder(peer, traceparent)
        for digest in digests:
            self._holders[digest] = holder
            self._holders.move_to_end(digest)
        while len(self._holders) > MAX_HOLDERS:
            self._holders.popitem(last=False)

    async def _longest_prefixes(
        self, lookup: Lookup, sequence_hashes: bytes
    ) -> tuple[PeerSource, PeerSource]:
        """The peers with the longest prefix in the arena, and in arena and disk together."""
        subject = self._bus.subjects.index(lookup.prompt.space.model)
        prompt = lookup.prompt
        traces = [prompt.traceparent] if prompt.traceparent else []
        query = OverlapQuery([sequence_hashes], prompt.salt, traces)
        try:
            reply = await self._bus.request(subject, query, _overlaps, FIND_S, at_once=True)
            rows = unpack_rows(reply.rows[0] if reply.rows else b"")
            overlaps = [(reply.ranks[row.rank].instance, row.host, row.disk) for row in rows]
        except (BusError, struct.error, IndexError) as error:
            log.debug("the index query for peers' blocks failed: %s", error)
            return NO_SOURCE, NO_SOURCE
        peers = self._exchange.compatible(lookup.prompt.space)
        held = [(peer, arena, disk) for peer, arena, disk in overlaps if peer in peers]
        in_arena = (PeerSource(peer, arena) for peer, arena, _ in held)
        in_all = (PeerSource(peer, arena + disk) for peer, arena, disk in held)
        return (
            max(in_arena, key=_end, default=NO_SOURCE),
            max(in_all, key=_end, default=NO_SOURCE),
        )

    # reading

    def has_holder(self, digest: bytes) -> bool:
        """True if a peer without a recent failure had the block at the last lookup."""
        holder = self._holders.get(digest)
        return holder is not None and not self._exchange.failed_recently(holder.peer)

    def start(self, moves: Iterable[Move]) -> None:
        """Start moves of blocks with a holder into the arena; each is reported to `on_moved`."""
        by_holder: defaultdict[tuple[PeerHolder, int], list[Move]] = defaultdict(list)
        for move in moves:
            holder = self._holders.pop(move.source.block.digest)
            by_holder[holder, move.source.block.space.block_bytes].append(move)
        for (holder, size), batch in by_holder.items():
            for start in range(0, len(batch), BATCH_BLOCKS):
                self._tasks.start(self._get(holder, size, batch[start : start + BATCH_BLOCKS]))

    async def _get(self, holder: PeerHolder, size: int, batch: Sequence[Move]) -> None:
        checksums = array("Q")
        try:
            checksums = await self._read(holder, size, batch)
        except (BusError, OSError, TransferError, ValueError) as error:
            self._on_failure(holder.peer, error, batch)
        ends = await asyncio.to_thread(self._verified, batch, checksums, size)
        self._on_moved(ends)

    async def _read(self, holder: PeerHolder, size: int, batch: Sequence[Move]) -> "array[int]":
        """Copy the peer's blocks into the arena; return the checksums of those it lent."""
        transport, region, peer = self._transport, self._region, holder.peer
        digests = b"".join(move.source.block.digest for move in batch)
        subject = self._bus.subjects.kvbm(peer)
        message = Lend(digests, size, holder.traceparent)
        lent = await self._bus.request(subject, message, _lends, LEND_S)
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

    def _verified(self, batch: Sequence[Move], checksums: "array[int]", size: int) -> Ends:
        ends: Ends = []
        for index, move in enumerate(batch):
            end = MoveEnd.UNREADABLE
            if index < len(checksums):
                good = xxh3(self._arena.view(move.target.offset, size)) == checksums[index]
                move.source.checksum = checksums[index]
                end = MoveEnd.DONE if good else MoveEnd.CORRUPT
            ends.append((move, end))
        return ends

    def forget(self, peer: str) -> None:
        """Close the connection to a peer that has left."""
        descriptor = self._grants.pop(peer, None)
        if descriptor is not None and self._transport is not None:
            with suppress(TransferError):  # an invalid grant has opened no connection
                self._transport.forget(descriptor)

    def _on_failure(self, peer: str, error: Exception, batch: Sequence[Move]) -> None:
        self._exchange.report_failure(peer, error)
        if isinstance(error, TransferError) and not error.settled:
            log.error("%d arena blocks are withdrawn from use", len(batch))
            for move in batch:
                self._hold(move.target)

    # transport

    @property
    def region(self) -> Region | None:
        """The arena as registered for transfers, once the transport is open."""
        return self._region

    def open_transport(self) -> None:
        """Open the transport when the first peer joins."""
        if self._opening is None:
            self._opening = self._tasks.start(self._open_transport())

    @property
    def opening(self) -> bool:
        """True if the transport was not opened yet, or is being opened."""
        return self._opening is None or not self._opening.done()

    async def _open_transport(self) -> None:
        try:
            self._transport = await Transport.open(self._options)
            self._region = self._transport.register(self._arena.map)
        except TransferError as error:
            log.warning("cannot read blocks from other nodes: %s", error)


class NoPeerReader:
    """A node that neither reads from peers nor lends to them."""

    region: Region | None = None
    opening = False

    async def close(self) -> None:
        pass

    async def find(self, lookup: Lookup, known: int) -> tuple[int, PeerSource | None]:
        return 0, None

    def add_holder(self, digests: Iterable[bytes], peer: str, traceparent: str = "") -> None:
        pass

    def has_holder(self, digest: bytes) -> bool:
        return False

    def start(self, moves: Iterable[Move]) -> None:
        pass

    def forget(self, peer: str) -> None:
        pass

    def open_transport(self) -> None:
        pass


def _end(source: PeerSource) -> int:
    return source.end
