"""All blocks of a node and their copies in its tiers; what moves, and what is told of it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from math import inf
from operator import attrgetter

from kvmesh.bus.messages import KvEvent
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, TIERS, Block, Copy, CopyState
from kvmesh.kvbm.core.blocks.events import EventLog
from kvmesh.kvbm.core.blocks.load_cost import Traffic
from kvmesh.kvbm.core.blocks.remote_tier import RemoteTier
from kvmesh.kvbm.core.blocks.tier import EvictionTurn, Tier
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import BlockRetention, RetentionWish
from kvmesh.retention.outcomes import Directive


@dataclass(frozen=True, eq=False)
class Move:
    """Copy a block from `source` to `target`; both are used until `Store.moved` is told.

    Whoever brings it from outside the node fills in the source's checksum, and `wishes`, which
    came with it.
    """

    source: Copy
    target: Copy
    wishes: list[RetentionWish] = field(default_factory=list)


class MoveEnd(Enum):
    """How a move ended: of two tiers the source may be the one that failed, or the target."""

    DONE = "done"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    UNWRITABLE = "unwritable"


Path = tuple[int, int]
_tier_of = attrgetter("tier")


@dataclass
class StoreCounts:
    """What has happened since the start, for metrics; lists are by tier."""

    offered: int = 0
    written: int = 0
    hits: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    onboarded: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    corrupt: int = 0
    declined: int = 0
    waits: int = 0
    further: int = 0
    lent: int = 0
    prepared: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """A block was offered and not wanted."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


@dataclass(frozen=True)
class RemoteCounts:
    """A store that all nodes share: how many of its blocks to remember, and for how long."""

    most: int
    lease_s: float


class Store:
    """Blocks by digest. What came of the calls is gathered until it is taken."""

    def __init__(
        self, capacities: Mapping[int, int], budget: float, remote: RemoteCounts | None = None
    ) -> None:
        self.blocks: dict[bytes, Block] = {}
        self._by_sequence: dict[int, Block] = {}
        self.turn = EvictionTurn()
        self.tiers = {
            number: Tier(number, capacity, budget, self.turn, self._dropped)
            for number, capacity in capacities.items()
        }
        self.far = (
            RemoteTier(remote.most, remote.lease_s, self.turn, self._dropped) if remote else None
        )
        self.counts = StoreCounts()
        self._unwanted: list[bytes] = []
        self._events = EventLog()
        self._moves: list[Move] = []
        self._news: list[bytes] = []
        self._kept: list[tuple[bool, Copy]] = []
        self.traffic: defaultdict[Path, Traffic] = defaultdict(Traffic)

    # blocks

    @property
    def now(self) -> float:
        return self.turn.now

    def begin(self, now: float) -> None:
        """Begin an operation: what it touches is not evicted for it."""
        self.turn.serial += 1
        self.turn.now = now

    def find(self, digests: Iterable[bytes]) -> list[Block | None]:
        """The blocks that are called so, None where there is none."""
        return list(map(self.blocks.get, digests))

    def touch(self, blocks: Sequence[Block | None]) -> None:
        """These are asked for; of one prompt the last is evicted first."""
        serial = self.turn.serial
        here = [block for block in reversed(blocks) if block is not None]
        for block in here:
            block.touched = serial
        for number, tier in self.tiers.items():
            tier.touch(block.copies[number] for block in here if number in block.copies)

    def named(self, sequence: Iterable[int]) -> list[Block]:
        """Those of these blocks, by sequence hash, that are in some tier."""
        found = (self._by_sequence.get(name) for name in sequence)
        return [block for block in found if block is not None]

    def most_blocks(self, slot: int) -> list[int]:
        """How many blocks each of TIERS can have, with slots of at least `slot` bytes."""
        most = {number: tier.slots.capacity // slot for number, tier in self.tiers.items()}
        if self.far is not None:
            most[REMOTE] = self.far.most
        return [most.get(number, 0) for number in TIERS]

    # copies

    def reserve(self, block: Block, tier: int) -> Copy | None:
        """A staged copy in a tier, used once; None if there is no room."""
        block.touched = self.turn.serial
        copy = self._tier(tier).reserve(block)
        if copy is not None:
            self._know(block)
        return copy

    def restore(self, block: Block, tier: int, offset: int, checksum: int) -> bool:
        """Take in a copy that was there before a restart; False if it cannot be there."""
        copy = self.tiers[tier].restore(block, offset)
        if copy is None:
            return False
        self._know(block)
        self.register(copy, checksum)
        self.release(copy)
        return True

    def _know(self, block: Block) -> None:
        if block.digest not in self.blocks:
            block.uses.since = self.now
        self.blocks[block.digest] = block
        self._by_sequence[block.sequence] = block

    def register(self, copy: Copy, checksum: int) -> None:
        """A staged copy has its content now."""
        copy.checksum = checksum
        copy.state = CopyState.REGISTERED
        copy.inbound = False
        self._events.stored(copy.tier, copy.block)
        self._note(copy, True)

    def hold(self, *copies: Copy) -> None:
        for tier, same in groupby(copies, key=_tier_of):
            self._tier(tier).hold(*same)

    def release(self, *copies: Copy) -> None:
        for tier, same in groupby(copies, key=_tier_of):
            self._tier(tier).release(*same)

    def drop(self, copy: Copy) -> None:
        self._tier(copy.tier).drop(copy)

    def discard(self, copy: Copy) -> None:
        """Drop it; and if other nodes could find it, they should not."""
        if copy.tier == REMOTE and copy.ready:
            self._unwanted.append(copy.block.digest)
        self.drop(copy)

    def condemn(self, digests: list[bytes]) -> int:
        """Drop blocks whose content is not what it should be; returns how many there were."""
        bad = [block for digest in digests if (block := self.blocks.get(digest)) is not None]
        for copy in [copy for block in bad for copy in block.copies.values()]:
            self.discard(copy)
        self.counts.corrupt += len(bad)
        return len(bad)

    def _tier(self, number: int) -> Tier | RemoteTier:
        return self.far if number == REMOTE and self.far is not None else self.tiers[number]

    def remember(self, block: Block) -> None:
        """The remote store has it."""
        if self.far is None:
            return
        copy = block.copies.get(REMOTE)
        if copy is not None:
            self.far.heard(copy)
        elif (copy := self.reserve(block, REMOTE)) is not None:
            self.register(copy, 0)
            self.release(copy)

    def _dropped(self, copy: Copy) -> None:
        block = copy.block
        del block.copies[copy.tier]
        if copy.ready:
            self._events.removed(copy.tier, block)
        self._note(copy, False)
        if not block.copies and self.blocks.get(block.digest) is block:
            del self.blocks[block.digest]
            if self._by_sequence.get(block.sequence) is block:
                del self._by_sequence[block.sequence]

    def _note(self, copy: Copy, came: bool) -> None:
        if copy.tier == ARENA:
            self._news.append(copy.block.digest)
        elif copy.tier == DISK and copy.ready:
            self._kept.append((came, copy))

    # moves

    def move(self, source: Copy, target: Copy) -> None:
        """Have a registered copy's bytes brought to a staged one, which is used already."""
        self.hold(source)
        target.inbound = True
        self.traffic[source.tier, target.tier].begin(self.now)
        self._moves.append(Move(source, target))

    def moved(self, move: Move, end: MoveEnd) -> None:
        """A move has ended. What cannot be read any more is dropped."""
        source, target = move.source, move.target
        ok = end is MoveEnd.DONE
        size = source.block.space.block_bytes if ok else 0
        self.traffic[source.tier, target.tier].end(size, self.now)
        if ok and target.state is CopyState.STAGED:
            self.register(target, source.checksum)
            if target.tier in self.tiers:
                for wish in (*move.wishes, *wishes_of(source, self.now)):
                    self.claim(target, wish)
        elif not ok:
            self.drop(target)
        if end is MoveEnd.CORRUPT:
            self.counts.corrupt += 1
        if end in (MoveEnd.CORRUPT, MoveEnd.UNREADABLE):
            self.drop(source)
        self.release(source)
        self.release(target)

    def claim(
        self,
        copy: Copy,
        wish: RetentionWish,
        directive: Directive | None = None,
        alone: bool = False,
    ) -> None:
        """Keep a copy as is wished, as far as its tenant's budget allows; `alone` as there."""

        def ask(promises: RetentionBudget, keep: BlockRetention, size: int) -> None:
            promises.claim(keep, size, wish, self.now, directive, alone)

        self.tiers[copy.tier].change(copy, ask)

    # what came of it

    def take_moves(self) -> list[Move]:
        taken, self._moves = self._moves, []
        return taken

    def take_events(self) -> dict[int, list[KvEvent]]:
        return self._events.take()

    def take_unwanted(self) -> list[bytes]:
        """Digests of blocks that the remote store should not keep."""
        taken, self._unwanted = self._unwanted, []
        return taken

    def take_kept(self) -> list[tuple[bool, Copy]]:
        """Copies that came to the disk (True) or left it (False)."""
        taken, self._kept = self._kept, []
        return taken

    def take_news(self) -> list[bytes]:
        """Digests whose copy in the arena has come, or has gone."""
        taken, self._news = self._news, []
        return taken


def wishes_of(copy: Copy, now: float) -> list[RetentionWish]:
    """What is asked for a copy, as it goes with the block to another tier."""
    claims = copy.keep.claims if copy.keep is not None else ()
    return [
        claim.wish._replace(ttl_s=_left(claim.deadline, now), directive=None) for claim in claims
    ]


def _left(deadline: float, now: float) -> float | None:
    return None if deadline == inf else max(0.0, deadline - now)
