"""Sources of blocks beyond a simulated node, as the live kvbm uses them: store and peers."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvmesh.bus.messages import Prepare, Prepared
from kvmesh.index import unpack_rows
from kvmesh.kvbm.core.blocks.block import REMOTE, Copy
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd, carried_wishes
from kvmesh.kvbm.core.transfers.mesh_claims import ClaimMessage, PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.retention.claims import RetentionWish
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.simulator.nodes.node import SimulatedNode, batched, bytes_of
from kvmesh.simulator.nodes.options import NodeOptions
from kvmesh.simulator.virtual_clock import VirtualClock

STORE_BYTES = 4 << 20
BATCH_BLOCKS = 128
MAX_HOLDERS = 1 << 16
PREPARE_S = 0.25
PAUSE_S = 0.05
NO_SOURCE = PeerSource("", 0)
Find = Callable[[bytes], Overlaps]
Ends = list[tuple[Move, MoveEnd]]


class StoredBlock(NamedTuple):
    """A block's size, the time of its last use, and the retention that is stored with it."""

    size: int
    used: float
    wishes: list[RetentionWish]


class SimulatedStore:
    """At most `capacity` bytes; a block expires `lease_s` after its last lookup."""

    def __init__(self, capacity: int, lease_s: float) -> None:
        self._capacity = capacity
        self._lease_s = lease_s
        self._blocks: OrderedDict[bytes, StoredBlock] = OrderedDict()
        self._used = 0

    def put(self, digest: bytes, size: int, wishes: list[RetentionWish], now: float) -> None:
        self.drop([digest])
        self._blocks[digest] = StoredBlock(size, now, wishes)
        self._used += size
        while self._used > self._capacity:
            self.drop([next(iter(self._blocks))])

    def find(self, digests: Sequence[bytes], now: float) -> int:
        """Number of leading blocks in the store; restarts their leases."""
        for count, digest in enumerate(digests):
            block = self.get(digest, now)
            if block is None:
                return count
            self._blocks[digest] = block._replace(used=now)
            self._blocks.move_to_end(digest)
        return len(digests)

    def get(self, digest: bytes, now: float) -> StoredBlock | None:
        block = self._blocks.get(digest)
        return block if block is not None and now - block.used <= self._lease_s else None

    def drop(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            block = self._blocks.pop(digest, None)
            self._used -= block.size if block is not None else 0


class SimulatedSources:
    """The remote store, if any, and the memories of `nodes`, which `find` locates in the index."""

    def __init__(self, clock: VirtualClock, options: NodeOptions, find: Find) -> None:
        self.nodes: Mapping[str, SimulatedNode] = {}
        self._clock = clock
        self._options = options
        self._find = find
        self._store = (
            SimulatedStore(options.remote_bytes, options.remote_lease_s)
            if options.remote_bytes
            else None
        )
        self._holders: defaultdict[str, OrderedDict[bytes, str]] = defaultdict(OrderedDict)

    # lookups

    def look_up(self, node: SimulatedNode, lookup: Lookup) -> None:
        self._clock.after(self._options.message_s, partial(self._look_up, node, lookup))

    def _look_up(self, node: SimulatedNode, lookup: Lookup) -> None:
        if lookup.peer is not None:
            self._prepare(node, lookup, lookup.peer)
            return
        count = self._store.find(lookup.digests, self._clock.now) if self._store else 0
        more, peer = self._find_peer(node, lookup, count)
        node.on_found(lookup, count + more, peer)

    def _find_peer(
        self, node: SimulatedNode, lookup: Lookup, known: int
    ) -> tuple[int, PeerSource | None]:
        """Number of a lookup's blocks, after the first `known`, in one peer's memory.

        Also returns the peer with the longest prefix in memory and disk, if it is longer.
        """
        wanted, first = lookup.digests[known:], lookup.first + known
        if not wanted or not self._options.peers:
            return 0, None
        hashes = lookup.prompt.sequence_hashes[: first + len(wanted)].tobytes()
        overlaps = self._find(hashes)
        held = [
            (overlaps.ranks[row.rank].instance, row.host, row.disk)
            for row in unpack_rows(overlaps.rows)
        ]
        peers = [each for each in held if each[0] in self.nodes and each[0] != node.instance]
        in_memory = (PeerSource(name, host) for name, host, _ in peers)
        in_all = (PeerSource(name, host + disk) for name, host, disk in peers)
        nearest = max(in_memory, key=_end, default=NO_SOURCE)
        longest = max(in_all, key=_end, default=NO_SOURCE)
        readable = wanted[: max(0, nearest.end - first)]
        self._add_holder(node, readable, nearest.instance)
        return len(readable), longest if longest.end > max(first, nearest.end) else None

    def _add_holder(self, node: SimulatedNode, digests: Iterable[bytes], peer: str) -> None:
        holders = self._holders[node.instance]
        for digest in digests:
            holders[digest] = peer
            holders.move_to_end(digest)
        while len(holders) > MAX_HOLDERS:
            holders.popitem(last=False)

    def _prepare(self, node: SimulatedNode, lookup: Lookup, peer: PeerSource) -> None:
        """Have a peer make blocks ready."""
        stored = not self._options.peers
        space, engine = lookup.prompt.space, lookup.engine.hoped
        message = Prepare(
            space.model,
            space.layout,
            b"".join(lookup.digests),
            engine.compute_tps,
            engine.load_bps,
            PREPARE_S,
            stored,
        )
        self.nodes[peer.instance].prepare(message, partial(self._prepared, node, lookup, peer))

    def _prepared(
        self, node: SimulatedNode, lookup: Lookup, peer: PeerSource, reply: object
    ) -> None:
        if not isinstance(reply, Prepared):
            node.on_found(lookup, 0, None)
            return
        digests = lookup.digests
        if self._options.peers:
            self._add_holder(node, digests[: reply.blocks], peer.instance)
        more = reply.more or 0 < reply.blocks == len(digests) < peer.end - lookup.first
        pause = PAUSE_S if reply.more and not reply.blocks else 0.0
        found = partial(node.on_found, lookup, reply.blocks, peer if more else None)
        self._clock.after(pause, found)

    # moves

    def move(self, node: SimulatedNode, moves: list[Move]) -> None:
        holders = self._holders[node.instance]
        by_peer: defaultdict[str, list[Move]] = defaultdict(list)
        reads: list[Move] = []
        writes: list[Move] = []
        for move in moves:
            peer = holders.pop(move.source.block.digest, "") if move.source.tier == REMOTE else ""
            if peer:
                by_peer[peer].append(move)
            else:
                (reads if move.source.tier == REMOTE else writes).append(move)
        for name, from_peer in by_peer.items():
            for start in range(0, len(from_peer), BATCH_BLOCKS):
                batch = from_peer[start : start + BATCH_BLOCKS]
                self._clock.after(
                    self._options.message_s, partial(self._lend, node, self.nodes[name], batch)
                )
        for batch in batched(writes, STORE_BYTES):
            self._write(node, batch)
        for batch in batched(reads, STORE_BYTES):
            self._read(node, batch)

    def _lend(self, node: SimulatedNode, peer: SimulatedNode, batch: list[Move]) -> None:
        """Read blocks from a peer's memory, which lends them for that time."""
        now, block_bytes = self._clock.now, batch[0].source.block.space.block_bytes
        digests = [move.source.block.digest for move in batch]
        lent = peer.manager.lending.lend(digests, block_bytes, now)
        size = len(lent) * block_bytes
        node.totals.network += size
        ends = max(peer.network_out.reserve(now, size), node.network_in.reserve(now, size))
        self._clock.at(ends, partial(self._take_back, node, peer, batch, lent))

    def _take_back(
        self, node: SimulatedNode, peer: SimulatedNode, batch: list[Move], lent: list[Copy]
    ) -> None:
        peer.manager.lending.take_back(lent, self._clock.now)
        peer.settle()
        node.on_moved(
            [
                (move, MoveEnd.DONE if number < len(lent) else MoveEnd.UNREADABLE)
                for number, move in enumerate(batch)
            ]
        )

    def _write(self, node: SimulatedNode, batch: list[Move]) -> None:
        size = bytes_of(batch)
        node.totals.store_written += size
        ends = node.store_out.reserve(self._clock.now, size)
        self._clock.at(ends, partial(self._written, node, batch))

    def _written(self, node: SimulatedNode, batch: list[Move]) -> None:
        now = self._clock.now
        if self._store is not None:
            for move in batch:
                block, wishes = move.source.block, carried_wishes(move.source, now)
                self._store.put(block.digest, block.space.block_bytes, wishes, now)
        node.on_moved([(move, MoveEnd.DONE) for move in batch])

    def _read(self, node: SimulatedNode, batch: list[Move]) -> None:
        now = self._clock.now
        ends: Ends = []
        size = 0
        for move in batch:
            block = move.source.block
            stored = self._store.get(block.digest, now) if self._store is not None else None
            ends.append((move, MoveEnd.UNREADABLE if stored is None else MoveEnd.DONE))
            if stored is not None:
                size += stored.size
                move.wishes.extend(stored.wishes)
        node.totals.store_read += size
        self._clock.at(node.store_in.reserve(now, size), partial(node.on_moved, ends))

    # other nodes

    def drop(self, digests: list[bytes]) -> None:
        if self._store is not None:
            self._store.drop(digests)

    def claim(self, node: SimulatedNode, messages: list[ClaimMessage]) -> None:
        for other in self.nodes.values():
            if other is not node:
                for message in messages:
                    receive = partial(other.receive_claim, node.instance, message)
                    self._clock.after(self._options.message_s, receive)


def _end(source: PeerSource) -> int:
    return source.end
