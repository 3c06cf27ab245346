"""What every rank holds, kept from numbered events: the pure core of the indexer.

The state of a rank is *known* while its events were seen without a gap from id 0, or from a
`Cleared` of all tiers, which begins every full dump. While it is not known the rank counts zero
and waits for a dump. Events are numbered per (instance, rank), so duplicates are recognised by id
wherever they come from: the publisher, a re-read of the stream, or a snapshot that is newer than
the stream position it covers.
"""

import heapq
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.bus.messages import Cleared, Instance, KvEvent, RankKey, Removed, Stored
from kvmesh.hashing import HASH_BYTES
from kvmesh.index.interface import PrefixIndex
from kvmesh.indexer.decoding import Bad, Events, EventSource
from kvmesh.indexer.incarnations import Incarnations, rank_count, source_of_card
from kvmesh.indexer.queries.shards import Shard

SLACK = 2
SPARE_BLOCKS = 4096
MIN_INTERVAL_S = 1.0
MAX_INTERVAL_S = 5.0
MASK = (1 << 64) - 1
WHOLE = Shard()
NOBODY = RankKey("", 0)


@dataclass(slots=True)
class RankState:
    """One rank: its number in the index, the next event id, and when to ask for a dump."""

    key: RankKey
    slot: int
    next: int = 0
    known: bool = True
    asks: int = 0
    ask_at: float | None = None
    asked_at: float = -1e9


@dataclass(slots=True)
class Holder:
    """One instance of a worker or kvbm and its ranks."""

    source: EventSource
    instance: str
    ranks: dict[int, RankState] = field(default_factory=dict)
    orphaned_at: float | None = None


@dataclass(slots=True)
class EventCounts:
    """Totals since the start, in the units of the metrics that export them."""

    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    orphans: int = 0
    bad_events: int = 0


class RankStates:
    """Applies events to an index and keeps the table of ranks. Not thread-safe."""

    def __init__(self, index: PrefixIndex, shard: Shard = WHOLE) -> None:
        self.index = index
        self.shard = shard
        self.counts = EventCounts()
        self.lives = Incarnations()
        self.keys: list[RankKey] = []
        self._ranks: list[RankState | None] = []
        self._free: list[int] = []
        self._holders: dict[str, Holder] = {}
        self._current: dict[EventSource, str] = {}
        self._lost: dict[int, RankState] = {}
        self._reconciled = False

    # --- lives

    def joined(self, card: Instance) -> None:
        """A lease appeared or changed. One that had lapsed is in doubt until it dumps.

        So is one that appears after `reconcile`, and of which history told nothing: it may have
        lapsed before this index began.
        """
        source = source_of_card(card)
        if source is None or not self.lives.add(source, card):
            return
        newest = self.lives.newest(source)
        if newest is None or newest.instance != card.instance:
            self._drop(card.instance)
            return
        current = self._current.get(source)
        if current is not None and current != card.instance:
            self._drop(current)
        self._rename(card.instance, source)
        self._revive(card)
        if self._reconciled:
            self._doubt(card, unheard=True)

    def left(self, card: Instance) -> None:
        """A lease ended: its blocks are gone for us."""
        source = source_of_card(card)
        if source is None or not self.lives.remove(source, card):
            return
        self._drop(card.instance)
        newest = self.lives.newest(source)
        if newest is not None:
            self._revive(newest)

    def _rename(self, instance: str, source: EventSource) -> None:
        """What is known of an instance, perhaps from its events alone, is that of `source`."""
        holder = self._holders.get(instance)
        if holder is not None and holder.source != source:
            if self._current.get(holder.source) == instance:
                del self._current[holder.source]
            holder.source = source
            self._current[source] = instance

    def _revive(self, card: Instance) -> None:
        """An instance that was ignored counts again: some of its events were missed."""
        if self.lives.is_gone(card.instance):
            self.lives.recall(card.instance)
            self._doubt(card)

    def reconcile(self) -> None:
        """Drop every instance without a lease; for the moment when history has been read.

        A rank of which it tells nothing is in doubt: an idle worker's events may have been on a
        stream that is gone.
        """
        for instance in [i for i in self._holders if i not in self.lives]:
            self._drop(instance)
        for card in self.lives.cards:
            self._doubt(card, unheard=True)
        self._reconciled = True

    def sweep(self, now: float, grace: float) -> None:
        """Drop instances that have published for `grace` seconds without holding a lease."""
        for holder in list(self._holders.values()):
            if holder.instance in self.lives:
                holder.orphaned_at = None
            elif holder.orphaned_at is None:
                holder.orphaned_at = now
            elif now - holder.orphaned_at > grace:
                self._drop(holder.instance)

    def doubt_all(self) -> None:
        """Part of the stream was never seen: no rank is known any more."""
        for holder in self._holders.values():
            for rank in holder.ranks.values():
                self._lose(rank)
        for card in self.lives.cards:
            self._doubt(card)

    # --- events

    def apply(self, batch: Events) -> None:
        """Apply what is new in a batch; a gap before it makes the rank unknown."""
        self.counts.batches += 1
        holder = self._holder(batch.source, batch.instance)
        if holder is None:
            self.counts.stale += 1
            return
        rank = holder.ranks.get(batch.rank) or self._add_rank(holder, batch.rank)
        events = self._unseen(rank, batch.first, batch.events)
        for event in events:
            if not rank.known and _starts_dump(event):
                self._find(rank)
            if rank.known:
                self._apply_event(rank, event)

    def _unseen(
        self, rank: RankState, first: int, events: Sequence[KvEvent | Bad]
    ) -> Sequence[KvEvent | Bad]:
        seen = rank.next - first
        if seen > 0:
            self.counts.duplicates += min(seen, len(events))
        elif seen < 0 and rank.known:
            self._lose(rank)
        elif first == 0 and rank.next == 0:
            self._find(rank)
        rank.next = max(rank.next, first + len(events))
        return events[seen:] if seen > 0 else events

    def _apply_event(self, rank: RankState, event: KvEvent | Bad) -> None:
        if isinstance(event, Stored):
            self._store(rank, event)
        elif isinstance(event, Removed):
            self.counts.removed_blocks += self.index.remove(rank.slot, event.tier, event.engine)
        elif isinstance(event, Cleared):
            self.counts.cleared += 1
            self.index.clear(rank.slot, event.tier)
        else:
            self._skip(rank, event)

    def _store(self, rank: RankState, event: Stored) -> None:
        parent = None if event.parent is None else event.parent & MASK
        salt = event.salt & MASK
        if event.previous is not None:
            self._attach(rank, event, event.previous & MASK)
        elif parent is None and not self.shard.owns_root(salt, event.local):
            return
        elif self.index.store(rank.slot, event.tier, parent, event.engine, event.local, salt):
            self.counts.stored_blocks += len(event.engine) // HASH_BYTES
        elif self.shard.whole:  # elsewhere it continues a prompt of another shard
            self.counts.orphans += 1

    def _attach(self, rank: RankState, event: Stored, previous: int) -> None:
        """Every shard keeps these: which prompt they belong to cannot be told."""
        self.index.attach(rank.slot, event.tier, previous, event.engine, event.local)
        self.counts.stored_blocks += len(event.engine) // HASH_BYTES

    def _skip(self, rank: RankState, bad: Bad) -> None:
        self.counts.bad_events += 1
        if not bad.unknown_tag:
            self._lose(rank)

    # --- repair

    @property
    def unknown(self) -> int:
        """How many ranks wait for a dump."""
        return len(self._lost)

    def due(self, now: float, delay: float) -> list[RankKey]:
        """Ranks to ask for a dump now: first `delay` seconds after the loss, then ever rarer."""
        asked = []
        for rank in self._lost.values():
            if rank.key.instance not in self.lives:
                continue
            if rank.ask_at is None:
                rank.ask_at = max(now + delay, rank.asked_at + MIN_INTERVAL_S)
            if rank.ask_at > now:
                continue
            if rank.asks:
                rank.next = -1  # the last answer was lost, or the ids we saw were nonsense
            rank.asks += 1
            rank.asked_at = now
            rank.ask_at = now + min(MAX_INTERVAL_S, MIN_INTERVAL_S * 2 ** (rank.asks - 1))
            asked.append(rank.key)
        return asked

    def curb(self) -> list[RankKey]:
        """Lose the ranks that tell of far more blocks than their card says: their events lie.

        This is what bounds the index: blocks that events told of are never dropped otherwise.
        """
        excessive = []
        for slot, *tiers in struct.iter_unpack("<5I", self.index.ranks()):
            rank = self._ranks[slot]
            if rank is not None and sum(tiers) > self._most_blocks(rank):
                excessive.append(rank.key)
                self._lose(rank)
        return excessive

    def blocks_by_rank(self) -> dict[tuple[str, int], int]:
        """Blocks in the engine's own memory, by instance and rank."""
        counted = {}
        for slot, first, *_ in struct.iter_unpack("<5I", self.index.ranks()):
            rank = self._ranks[slot]
            if rank is not None:
                counted[rank.key.instance, rank.key.rank] = int(first)
        return counted

    def _most_blocks(self, rank: RankState) -> float:
        card = self.lives.card(rank.key.instance)
        blocks = _most_blocks(card) if card is not None else None
        return SLACK * blocks + SPARE_BLOCKS if blocks is not None else float("inf")

    def _lose(self, rank: RankState) -> None:
        if rank.known:
            self.counts.gaps += 1
            rank.known = False
            rank.asks = 0
            rank.ask_at = None
            self.index.clear(rank.slot)
            self._lost[rank.slot] = rank

    def _find(self, rank: RankState) -> None:
        rank.known = True
        self._lost.pop(rank.slot, None)

    def _doubt(self, card: Instance, unheard: bool = False) -> None:
        """Ask for dumps of its ranks, or of those alone that no event has told of."""
        source = source_of_card(card)
        holder = self._holder(source, card.instance) if source else None
        if holder is None:
            return
        for number in range(rank_count(card)):
            rank = holder.ranks.get(number)
            if rank is None or not unheard:
                self._lose(rank or self._add_rank(holder, number))

    # --- the table

    @property
    def ranks(self) -> int:
        return len(self.keys) - len(self._free)

    def numbers(self) -> list[tuple[str, int]]:
        """Every (instance, rank) there is now."""
        return [(name, n) for name, holder in self._holders.items() for n in holder.ranks]

    def rank(self, instance: str, number: int) -> RankState | None:
        holder = self._holders.get(instance)
        return holder.ranks.get(number) if holder else None

    def source(self, instance: str) -> EventSource | None:
        holder = self._holders.get(instance)
        return holder.source if holder else None

    def adopt(
        self, source: EventSource, instance: str, number: int, next_id: int, known: bool
    ) -> int:
        """Take over a rank as it was captured; returns its number in the index.

        Raises ValueError if the rank is there already or its instance no longer counts.
        """
        holder = self._holder(source, instance)
        if holder is None or number in holder.ranks:
            raise ValueError(f"rank {number} of {instance} cannot be adopted")
        rank = self._add_rank(holder, number)
        rank.next = next_id
        if not known:
            self._lose(rank)
        return rank.slot

    def reset(self) -> None:
        """Back to empty, lives apart."""
        for instance in list(self._holders):
            self._drop(instance)
        self.lives.forget_gone()

    def _holder(self, source: EventSource, instance: str) -> Holder | None:
        """The instance's entry, made if need be; None for one that was replaced."""
        holder = self._holders.get(instance)
        if holder is not None:
            return holder
        if self.lives.is_gone(instance):
            return None
        card = self.lives.card(instance)
        source = (source_of_card(card) if card else None) or source
        newest = self.lives.newest(source)
        if newest is not None and newest.instance != instance:
            self.lives.dismiss(instance)  # until its lease, if there is one, is seen
            return None
        current = self._current.get(source)
        if current is not None:
            self._drop(current)
        self._current[source] = instance
        holder = self._holders[instance] = Holder(source, instance)
        return holder

    def _drop(self, instance: str) -> None:
        self.lives.dismiss(instance)
        holder = self._holders.pop(instance, None)
        if holder is None:
            return
        if self._current.get(holder.source) == instance:
            del self._current[holder.source]
        for rank in holder.ranks.values():
            self.index.clear(rank.slot)
            self.keys[rank.slot] = NOBODY
            self._ranks[rank.slot] = None
            self._lost.pop(rank.slot, None)
            heapq.heappush(self._free, rank.slot)

    def _add_rank(self, holder: Holder, number: int) -> RankState:
        if not self._free:
            heapq.heappush(self._free, len(self.keys))
            self.keys.append(NOBODY)
            self._ranks.append(None)
        slot = heapq.heappop(self._free)
        rank = RankState(RankKey(holder.instance, number), slot)
        self.keys[slot] = rank.key
        self._ranks[slot] = holder.ranks[number] = rank
        return rank


def _most_blocks(card: Instance) -> int | None:
    """How many blocks each rank of a holder can have; None if its card does not say."""
    if card.store is not None:
        return sum(card.store.tier_blocks) if card.store.tier_blocks else None
    return card.capacity.blocks + sum(card.capacity.tier_blocks) if card.capacity else None


def _starts_dump(event: KvEvent | Bad) -> bool:
    return isinstance(event, Cleared) and event.tier is None
