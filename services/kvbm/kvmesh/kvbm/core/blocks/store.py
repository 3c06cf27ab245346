"""All blocks of a node and their copies in its tiers, with the resulting moves and events."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, groupby
from math import inf
from operator import attrgetter

from kvmesh.bus.messages import CLEARED, CLIPPED, CORRUPT, KvEvent
from kvmesh.kvbm.core.blocks.block import (
    ARENA,
    DISK,
    EVICTION,
    REMOTE,
    TIERS,
    Block,
    Copy,
    CopyState,
    DropCause,
)
from kvmesh.kvbm.core.blocks.events import EventLog
from kvmesh.kvbm.core.blocks.load_cost import Traffic
from kvmesh.kvbm.core.blocks.remote_tier import RemoteTier
from kvmesh.kvbm.core.blocks.restored import RestoredBlocks
from kvmesh.kvbm.core.blocks.tier import Operation, Tier
from kvmesh.retention.awaited_prompts import still_expected
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import BlockRetention, RetentionWish
from kvmesh.retention.outcomes import Directive


@dataclass(frozen=True, eq=False)
class Move:
    """Copy a block from `source` to `target`; both have a user until `Store.end_move`.

    A mover that loads a block from outside the node fills in the source's checksum, and `wishes`
    with the retention stored with the block.
    """

    source: Copy
    target: Copy
    wishes: list[RetentionWish] = field(default_factory=list)


class MoveEnd(Enum):
    """Result of a move; UNREADABLE and UNWRITABLE name the side that failed: source or target."""

    DONE = "done"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    UNWRITABLE = "unwritable"


Path = tuple[int, int]
REFUSALS = ("closed", "thinking", "orphan", "busy", "full", "slow")
_tier_of = attrgetter("tier")


@dataclass
class StoreCounts:
    """Counters since the start, for metrics; lists are by tier."""

    offered: int = 0
    written: int = 0
    hits: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    onboarded: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    corrupt: int = 0
    declined: int = 0
    outwaited: int = 0
    waits: int = 0
    peer_waits: int = 0
    lent: int = 0
    prepared: int = 0
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))

    def refuse(self, reason: str) -> None:
        """Count a refused block of an offer; `reason` is one of REFUSALS."""
        self.refused[reason] += 1


@dataclass(frozen=True)
class RemoteTierConfig:
    """Limits of the index of the shared store: number of blocks, seconds that each is valid."""

    max_blocks: int
    lease_s: float


class Store:
    """Blocks by digest. Moves, events and changes accumulate until they are drained."""

    def __init__(
        self,
        capacities: Mapping[int, int],
        tenant_share: float,
        remote: RemoteTierConfig | None = None,
    ) -> None:
        self.blocks: dict[bytes, Block] = {}
        self._by_sequence_hash: defaultdict[int, dict[int, Block]] = defaultdict(dict)  # by part
        self.operation = Operation()
        self.tiers = {
            number: Tier(number, capacity, tenant_share, self.operation, self._dropped)
            for number, capacity in capacities.items()
        }
        self.remote = (
            RemoteTier(remote.max_blocks, remote.lease_s, self.operation, self._dropped)
            if remote
            else None
        )
        self.counts = StoreCounts()
        self.restored = RestoredBlocks()
        self._remote_drops: list[bytes] = []
        self._discarded: set[Copy] = set()
        # the remote store keeps these blocks for a while after their copies have left the index
        self._lapsed: OrderedDict[bytes, Block] = OrderedDict()
        self._events = EventLog()
        self._moves: list[Move] = []
        self._arena_changes: list[bytes] = []
        self._disk_changes: list[tuple[bool, Copy]] = []
        # every path to the arena from now on: a rate would miss the first bytes of a new series
        lower = [DISK] if DISK in capacities else []
        lower += [REMOTE] if remote else []
        self.traffic = defaultdict(Traffic, {(tier, ARENA): Traffic() for tier in lower})

    # blocks

    @property
    def now(self) -> float:
        return self.operation.now

    def begin(self, now: float) -> None:
        """Start an operation at `now`; it evicts no blocks that it touches."""
        self.operation.serial += 1
        self.operation.now = now
        self.operation.request = None

    def find(self, digests: Iterable[bytes]) -> list[Block | None]:
        """The blocks with these digests; None for each that is unknown."""
        return list(map(self.blocks.get, digests))

    def touch(self, blocks: Sequence[Block | None]) -> None:
        """Record a use of a prompt's blocks, last block first, so that it is evicted first."""
        serial, now = self.operation.serial, self.operation.now
        known = [block for block in reversed(blocks) if block is not None]
        for block in known:
            block.last_operation, block.used, block.doubtful = serial, now, False
            if block.expected:
                block.expected = still_expected(block.expected)
        for number, tier in self.tiers.items():
            tier.touch(block.copies[number] for block in known if number in block.copies)

    def find_by_sequence_hash(self, sequence_hashes: Iterable[int]) -> list[Block]:
        """The blocks with these sequence hashes that are in some tier, with all their parts."""
        hashes = list(sequence_hashes)
        found = (map(part.get, hashes) for part in self._by_sequence_hash.values())
        return [block for block in chain.from_iterable(found) if block is not None]

    def max_blocks(self, slot_bytes: int) -> list[int]:
        """Capacity in blocks of each of TIERS, with slots of at least `slot_bytes`."""
        limits = {n: tier.slots.capacity // slot_bytes for n, tier in self.tiers.items()}
        if self.remote is not None:
            limits[REMOTE] = self.remote.max_blocks
        return [limits.get(number, 0) for number in TIERS]

    # copies

    def reserve(self, block: Block, tier: int, request: str | None = None) -> Copy | None:
        """A staged copy in a tier, with one user; None if the tier has no free slot for it.

        `request` is the request that needs the copy, if it is known.
        """
        block.last_operation, block.used = self.operation.serial, self.operation.now
        copy = self._tier(tier).reserve(block, request)
        if copy is not None:
            self._index(block)
        return copy

    def restore(self, block: Block, tier: int, offset: int, checksum: int) -> bool:
        """Register a copy that the tier held before a restart; False if its slot is unavailable."""
        copy = self.tiers[tier].restore(block, offset)
        if copy is None:
            return False
        self._index(block)
        self.register(copy, checksum)
        self.release(copy)
        return True

    def _index(self, block: Block) -> None:
        if block.digest not in self.blocks:
            block.frequency.since = self.now
        self.blocks[block.digest] = block
        self._by_sequence_hash[block.space.layout.part][block.sequence_hash] = block

    def register(self, copy: Copy, checksum: int) -> None:
        """Mark a staged copy's content as final."""
        if copy.tier == REMOTE:
            self._lapsed.pop(copy.block.digest, None)
        copy.checksum = checksum
        copy.state = CopyState.REGISTERED
        copy.inbound = False
        self._events.stored(copy.tier, copy.block)
        self._log_change(copy, True)

    def hold(self, *copies: Copy) -> None:
        for tier, same in groupby(copies, key=_tier_of):
            self._tier(tier).hold(*same)

    def release(self, *copies: Copy) -> None:
        for tier, same in groupby(copies, key=_tier_of):
            self._tier(tier).release(*same)

    def note_read(self, copies: Iterable[Copy]) -> None:
        """Note that a worker or another node reads these copies in the arena."""
        for copy in copies:
            if copy.restored:
                self._end_restored(copy, True)

    def _end_restored(self, copy: Copy, read: bool) -> None:
        copy.restored = False
        self.restored.end(copy.block.tenant, copy.block.space.block_bytes, read)

    def drop(self, copy: Copy, cause: DropCause = EVICTION) -> None:
        """Drop a copy; of a staged one, which no event has announced, the cause does not matter."""
        self._tier(copy.tier).drop(copy, cause)

    def discard(self, copy: Copy, cause: DropCause) -> None:
        """Drop a copy; if it is remote, the store drops the block, too, once it is written."""
        if copy.tier == REMOTE and copy.registered:
            self._remote_drops.append(copy.block.digest)
        elif copy.tier == REMOTE and copy.inbound:
            self._discarded.add(copy)
        self.drop(copy, cause)

    def discard_lapsed(self, chosen: Callable[[Block], bool]) -> None:
        """Have the remote store drop the chosen blocks of which the index has no copy any more."""
        gone = [digest for digest, block in self._lapsed.items() if chosen(block)]
        for digest in gone:
            del self._lapsed[digest]
        self._remote_drops += gone

    def drop_corrupt(self, digests: list[bytes]) -> int:
        """Drop all copies of blocks with wrong content; return the number of blocks."""
        corrupt = [block for digest in digests if (block := self.blocks.get(digest)) is not None]
        for copy in [copy for block in corrupt for copy in block.copies.values()]:
            self.discard(copy, DropCause(CORRUPT))
        self.counts.corrupt += len(corrupt)
        return len(corrupt)

    def _tier(self, number: int) -> Tier | RemoteTier:
        return self.remote if number == REMOTE and self.remote is not None else self.tiers[number]

    def add_remote(self, block: Block, request: str | None) -> None:
        """Register a block that the remote store has, found for a request."""
        if self.remote is None:
            return
        copy = block.copies.get(REMOTE)
        if copy is not None:
            self.remote.renew(copy)
        elif (copy := self.reserve(block, REMOTE, request)) is not None:
            self.register(copy, 0)
            self.release(copy)

    def _dropped(self, copy: Copy, cause: DropCause) -> None:
        block = copy.block
        del block.copies[copy.tier]
        if copy.restored:
            self._end_restored(copy, False)
        if copy.registered:
            self._events.removed(copy.tier, block, cause)
            if copy.tier == REMOTE and cause.reason != CLEARED and self.remote is not None:
                self._lapsed[block.digest] = block
                if len(self._lapsed) > self.remote.max_blocks:
                    self._lapsed.popitem(last=False)
        self._log_change(copy, False)
        if not block.copies and self.blocks.get(block.digest) is block:
            del self.blocks[block.digest]
            part = self._by_sequence_hash[block.space.layout.part]
            if part.get(block.sequence_hash) is block:
                del part[block.sequence_hash]

    def _log_change(self, copy: Copy, added: bool) -> None:
        if copy.tier == ARENA:
            self._arena_changes.append(copy.block.digest)
        elif copy.tier == DISK and copy.registered:
            self._disk_changes.append((added, copy))

    # moves

    def move(self, source: Copy, target: Copy) -> None:
        """Move a registered copy's bytes to a staged copy, which has a user already."""
        self.hold(source)
        target.inbound = True
        self.traffic[source.tier, target.tier].begin(self.now)
        self._moves.append(Move(source, target))

    def end_move(self, move: Move, end: MoveEnd) -> None:
        """Register the target of a move, or drop the copies that failed."""
        source, target = move.source, move.target
        ok = end is MoveEnd.DONE
        size = source.block.space.block_bytes if ok else 0
        self.traffic[source.tier, target.tier].end(size, self.now)
        if ok and target.state is CopyState.STAGED:
            self.register(target, source.checksum)
            if target.tier in self.tiers:
                for wish in (*move.wishes, *carried_wishes(source, self.now)):
                    self.claim(target, wish)
        elif not ok:
            self.drop(target)
        if target in self._discarded:
            self._discarded.remove(target)
            self._remote_drops.append(target.block.digest)
        if end is MoveEnd.CORRUPT:
            self.counts.corrupt += 1
        if end in (MoveEnd.CORRUPT, MoveEnd.UNREADABLE):
            # a store that all nodes share evicts by its own policy: what is gone is not damaged
            gone = source.tier == REMOTE and end is MoveEnd.UNREADABLE
            self.drop(source, EVICTION if gone else DropCause(CORRUPT))
        self.release(source)
        self.release(target)

    def claim(
        self,
        copy: Copy,
        wish: RetentionWish,
        directive: Directive | None = None,
        exclusive: bool = False,
    ) -> None:
        """Apply a wish within the tenant's budget; `exclusive` as in RetentionBudget.claim."""

        def change(budget: RetentionBudget, retention: BlockRetention, size: int) -> None:
            granted = budget.claim(retention, size, wish, self.now, directive, exclusive)
            copy.lapsed = None if granted else CLIPPED

        self.tiers[copy.tier].update_retention(copy, change)

    # results

    def drain_moves(self) -> list[Move]:
        moves, self._moves = self._moves, []
        return moves

    def drain_events(self) -> dict[int, list[KvEvent]]:
        return self._events.drain()

    def drain_remote_drops(self) -> list[bytes]:
        """Digests of blocks that the remote store is to drop."""
        digests, self._remote_drops = self._remote_drops, []
        return digests

    def drain_disk_changes(self) -> list[tuple[bool, Copy]]:
        """Copies added to the disk (True) or removed from it (False)."""
        changes, self._disk_changes = self._disk_changes, []
        return changes

    def drain_arena_changes(self) -> list[bytes]:
        """Digests of blocks whose arena copy was registered or dropped."""
        digests, self._arena_changes = self._arena_changes, []
        return digests


def carried_wishes(copy: Copy, now: float) -> list[RetentionWish]:
    """The retention wishes of a copy that follow the block to another tier."""
    claims = copy.retention.claims if copy.retention is not None else ()
    return [
        claim.wish._replace(ttl_s=_ttl(claim.deadline, now), directive=None) for claim in claims
    ]


def _ttl(deadline: float, now: float) -> float | None:
    return None if deadline == inf else max(0.0, deadline - now)
