"""State of every rank, built from numbered KV events: the pure core of the indexer.

The state of a rank is *known* while its events were seen without a gap from id 0, or from a
`Cleared` of all tiers, which begins every full dump. An unknown rank has no blocks in the index
and waits for a dump. Events are numbered per (instance, rank), so duplicates are recognised by id
whatever their origin: the publisher, a replay of the stream, or a snapshot that is newer than the
stream sequence it covers.
"""

import heapq
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.bus.messages import (
    EVICTED,
    WORKER_GONE,
    Cleared,
    Instance,
    KvEvent,
    RankKey,
    Removed,
    Role,
    Stored,
)
from kvmesh.bus.subjects import name_of
from kvmesh.hashing import HASH_BYTES, sequence_hashes
from kvmesh.index.interface import PrefixIndex
from kvmesh.indexer.decoding import Bad, Events, EventSource
from kvmesh.indexer.incarnations import Incarnations, rank_count, source_of_card
from kvmesh.indexer.index_check import Checkpoint, Segments
from kvmesh.indexer.removed_blocks import Cause, RemovedBlocks
from kvmesh.indexer.shards import Shard

EXCESS_FACTOR = 2
EXCESS_BLOCKS = 4096
# of one worker or kvbm, whatever its card states; they take 4 GB of an indexer's memory
MAX_BLOCKS = 1 << 26
COUNT_EVERY = 1 << 16  # blocks that a worker stores until its blocks are counted again
MIN_INTERVAL_S = 1.0
MAX_INTERVAL_S = 5.0
_UINT64 = (1 << 64) - 1
WHOLE_INDEX = Shard()
NO_RANK = RankKey("", 0)


@dataclass(slots=True)
class RankState:
    """One rank: its slot in the index, the next event id, and the times of its dump requests."""

    key: RankKey
    slot: int
    next_event: int = 0
    known: bool = True
    dump_requests: int = 0
    next_request: float | None = None
    last_request: float = -1e9
    checkpoint: Checkpoint | None = None


@dataclass(slots=True)
class Holder:
    """One instance of a worker or kvbm and its ranks; `orphaned_at`: first seen without a lease."""

    source: EventSource
    instance: str
    ranks: dict[int, RankState] = field(default_factory=dict)
    orphaned_at: float | None = None


@dataclass(slots=True)
class Room:
    """Blocks that a worker may store, or that are refused if it is `full`, until it is counted."""

    blocks: int
    full: bool = False


@dataclass(slots=True)
class EventCounts:
    """Totals since the start, by metric name."""

    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    orphans: int = 0
    bad_events: int = 0
    dump_requests: int = 0


class RankStates:
    """Applies events to an index and maintains the table of ranks. Not thread-safe.

    `removed` gets the blocks that ranks remove; `on_unknown` is called when a rank needs a dump.
    """

    def __init__(
        self,
        index: PrefixIndex,
        shard: Shard = WHOLE_INDEX,
        removed: RemovedBlocks | None = None,
    ) -> None:
        self.index = index
        self.shard = shard
        self.removed = RemovedBlocks(0) if removed is None else removed
        self.counts = EventCounts()
        self.incarnations = Incarnations()
        self.keys: list[RankKey] = []
        self._ranks: list[RankState | None] = []
        self._free: list[int] = []
        self._holders: dict[str, Holder] = {}
        self._current: dict[EventSource, str] = {}
        self._unknown: dict[int, RankState] = {}
        self._rooms: dict[str, Room] = {}  # by the worker's name
        self.on_unknown: Callable[[], None] = lambda: None
        self._reconciled = False

    # --- leases and incarnations

    def joined(self, card: Instance) -> None:
        """Add or update a lease.

        The ranks of an instance whose lease had lapsed are unknown until its dump, and so are those
        of an instance that appears after `reconcile` without events on the stream: its lease may
        have lapsed before this index started.
        """
        source = source_of_card(card)
        if source is None or not self.incarnations.add(source, card):
            return
        newest = self.incarnations.newest(source)
        if newest is None or newest.instance != card.instance:
            self._drop(card.instance)
            return
        current = self._current.get(source)
        if current is not None and current != card.instance:
            self._drop(current)
        self._rename(card.instance, source)
        self._restore(card)
        if self._reconciled:
            self._mark_ranks_unknown(card, only_absent=True)

    def left(self, card: Instance) -> None:
        """Remove a lease and drop the instance's blocks."""
        source = source_of_card(card)
        if source is None or not self.incarnations.remove(source, card):
            return
        self._drop(card.instance)
        newest = self.incarnations.newest(source)
        if newest is not None:
            self._restore(newest)

    def _rename(self, instance: str, source: EventSource) -> None:
        """Move an instance's state, perhaps built from events alone, to `source`."""
        holder = self._holders.get(instance)
        if holder is not None and holder.source != source:
            if self._current.get(holder.source) == instance:
                del self._current[holder.source]
            holder.source = source
            self._current[source] = instance

    def _restore(self, card: Instance) -> None:
        """Stop ignoring an instance; its ranks are unknown, as some of its events were skipped."""
        if self.incarnations.is_ignored(card.instance):
            self.incarnations.stop_ignoring(card.instance)
            self._mark_ranks_unknown(card)

    def reconcile(self) -> None:
        """Drop every instance without a lease; call once the stream's history has been read.

        A rank without events in it becomes unknown: an idle worker's events may have been on an
        earlier stream.
        """
        for instance in [i for i in self._holders if i not in self.incarnations]:
            self._drop(instance)
        for card in self.incarnations.cards:
            self._mark_ranks_unknown(card, only_absent=True)
        self._reconciled = True

    def sweep(self, now: float, grace: float) -> None:
        """Drop instances that have had no lease for `grace` seconds."""
        for holder in list(self._holders.values()):
            if holder.instance in self.incarnations:
                holder.orphaned_at = None
            elif holder.orphaned_at is None:
                holder.orphaned_at = now
            elif now - holder.orphaned_at > grace:
                self._drop(holder.instance)

    def mark_all_unknown(self) -> None:
        """Mark every rank unknown: a part of the stream was lost."""
        for holder in self._holders.values():
            for rank in holder.ranks.values():
                self._mark_unknown(rank)
        for card in self.incarnations.cards:
            self._mark_ranks_unknown(card)

    # --- events

    def apply(self, batch: Events) -> None:
        """Apply a batch's new events; a gap before it makes the rank unknown."""
        self.counts.batches += 1
        holder = self._holder(batch.source, batch.instance)
        if holder is None:
            self.counts.stale += 1
            return
        rank = holder.ranks.get(batch.rank) or self._add_rank(holder, batch.rank)
        events = self._new_events(rank, batch.first, batch.events)
        if rank.checkpoint is not None:
            events = self._apply_to_checkpoint(rank, rank.checkpoint, events, batch)
        self._apply_all(rank, events, batch)

    def _apply_all(self, rank: RankState, events: Sequence[KvEvent | Bad], batch: Events) -> None:
        for event in events:
            if not rank.known and _begins_dump(event):
                self._mark_known(rank)
            if rank.known:
                self._apply_event(rank, event, batch)

    def _new_events(
        self, rank: RankState, first: int, events: Sequence[KvEvent | Bad]
    ) -> Sequence[KvEvent | Bad]:
        seen = rank.next_event - first
        if seen > 0:
            self.counts.duplicates += min(seen, len(events))
        elif seen < 0 and rank.known:
            self._mark_unknown(rank)
        elif first == 0 and rank.next_event == 0:
            self._mark_known(rank)
        rank.next_event = max(rank.next_event, first + len(events))
        return events[seen:] if seen > 0 else events

    def _apply_event(self, rank: RankState, event: KvEvent | Bad, batch: Events) -> None:
        if isinstance(event, Stored):
            if self._has_room(batch.source.worker, len(event.engine) // HASH_BYTES):
                self._store(rank, event)
        elif isinstance(event, Removed):
            removed = self.index.remove(rank.slot, event.tier, event.engine)
            self.counts.removed_blocks += len(removed) // HASH_BYTES
            reason, worker = event.reason or EVICTED, batch.source.worker
            self.removed.add(removed, Cause(worker, event.tier, batch.time, reason, event.request))
        elif isinstance(event, Cleared):
            self.counts.cleared += 1
            if event.reason is not None:
                self._record_all(rank, batch.source.worker, batch.time, event.reason, event.tier)
            self.index.clear(rank.slot, event.tier)
        else:
            self.counts.bad_events += 1
            if not event.unknown_tag:
                self._mark_unknown(rank)

    def _has_room(self, worker: str, blocks: int) -> bool:
        """True if a worker may store more blocks; its instances and ranks share MAX_BLOCKS."""
        room = self._rooms.get(worker)
        if room is None:  # its first blocks are not counted: that would be once for each worker
            room = self._rooms[worker] = Room(COUNT_EVERY)
        if room.blocks < blocks:
            held = sum(
                sum(tiers)
                for slot, *tiers in struct.iter_unpack("<5I", self.index.ranks())
                if name_of(self.keys[slot].instance) == worker
            )
            room.blocks = COUNT_EVERY + blocks
            room.full = held + room.blocks > MAX_BLOCKS
        room.blocks -= blocks
        return not room.full

    @property
    def full(self) -> list[str]:
        """Workers whose further blocks are not stored."""
        return [worker for worker, room in self._rooms.items() if room.full]

    def _store(self, rank: RankState, event: Stored) -> None:
        parent = None if event.parent is None else event.parent & _UINT64
        salt = event.salt & _UINT64
        if event.previous is not None:
            self._attach(rank, event, event.previous & _UINT64)
        elif parent is None and not self.shard.owns_root(salt, event.local):
            return
        elif self.index.store(rank.slot, event.tier, parent, event.engine, event.local, salt):
            self.counts.stored_blocks += len(event.engine) // HASH_BYTES
        elif self.shard.whole:  # a shard cannot distinguish orphans from blocks of another shard
            self.counts.orphans += 1

    def _attach(self, rank: RankState, event: Stored, previous: int) -> None:
        """Attach blocks in every shard: the event does not identify their prompt."""
        self.index.attach(rank.slot, event.tier, previous, event.engine, event.local)
        self.counts.stored_blocks += len(event.engine) // HASH_BYTES

    # --- checks

    def is_known(self, key: RankKey) -> bool:
        rank = self.rank(key.instance, key.rank)
        return rank is not None and rank.known

    def is_worker(self, instance: str) -> bool:
        """True for a live worker, false for a kvbm."""
        card = self.incarnations.card(instance)
        return card is not None and card.role is Role.WORKER

    def next_worker_rank(self, after: RankKey) -> RankKey | None:
        """The known rank of a worker that follows `after` in order of names, or the first one."""
        cards = (c for c in self.incarnations.cards if c.role is Role.WORKER)
        holders = (self._holders.get(card.instance) for card in cards)
        ranks = (rank for holder in holders if holder for rank in holder.ranks.values())
        keys = [rank.key for rank in ranks if rank.known]
        order = (after.instance, after.rank)
        later = [key for key in keys if (key.instance, key.rank) > order]
        return min(later or keys, key=lambda key: (key.instance, key.rank), default=None)

    def take_at(
        self, key: RankKey, event_id: int, taken: Callable[[Segments | None], None]
    ) -> bool:
        """Have `taken` called with the rank's blocks as they are before the event `event_id`.

        Returns False if that event has been applied, or another such call is pending.
        """
        rank = self.rank(key.instance, key.rank)
        if rank is None or not rank.known:
            taken(None)
        elif rank.checkpoint is not None or rank.next_event > event_id:
            return False
        elif rank.next_event == event_id:
            taken(self.index.dump(rank.slot))
        else:
            rank.checkpoint = Checkpoint(event_id, taken)
        return True

    def cancel_checkpoint(self, key: RankKey) -> None:
        """Call nothing for a pending `take_at` of the rank."""
        rank = self.rank(key.instance, key.rank)
        if rank is not None:
            rank.checkpoint = None

    def doubt(self, key: RankKey) -> None:
        """Mark a rank unknown whose blocks are not those of its worker."""
        rank = self.rank(key.instance, key.rank)
        if rank is not None:
            self._mark_unknown(rank)

    def _apply_to_checkpoint(
        self,
        rank: RankState,
        checkpoint: Checkpoint,
        events: Sequence[KvEvent | Bad],
        batch: Events,
    ) -> Sequence[KvEvent | Bad]:
        """Apply the events before the checkpoint, and take it once they are; return the others."""
        before = len(events) - (rank.next_event - checkpoint.event_id)
        if any(map(_begins_dump, events[: max(before, 0)])):
            # a publisher that drops its backlog in favour of a dump uses its event ids again
            _abandon(rank)
            return events
        if before > len(events):
            return events  # the checkpoint is further ahead
        self._apply_all(rank, events[: max(before, 0)], batch)
        rank.checkpoint = None
        checkpoint.taken(self.index.dump(rank.slot) if rank.known and before >= 0 else None)
        return events[max(before, 0) :]

    # --- repair

    @property
    def unknown(self) -> int:
        """Number of ranks that wait for a dump."""
        return len(self._unknown)

    def due_dumps(self, now: float, delay: float) -> list[RankKey]:
        """Ranks to request a dump of now: `delay` seconds after the loss, then with backoff."""
        due = []
        for rank in self._unknown.values():
            if rank.key.instance not in self.incarnations:
                continue
            if rank.next_request is None:
                rank.next_request = max(now + delay, rank.last_request + MIN_INTERVAL_S)
            if rank.next_request > now:
                continue
            if rank.dump_requests:
                rank.next_event = -1  # the last dump was lost, or the known ids were wrong
            rank.dump_requests += 1
            rank.last_request = now
            backoff = MIN_INTERVAL_S * 2 ** (rank.dump_requests - 1)
            rank.next_request = now + min(MAX_INTERVAL_S, backoff)
            due.append(rank.key)
        return due

    def mark_excessive_unknown(self) -> list[RankKey]:
        """Mark ranks unknown whose events report far more blocks than their card; returns them.

        This bounds the index, which otherwise drops blocks only on events and lapsed leases.
        """
        excessive = []
        for slot, *tiers in struct.iter_unpack("<5I", self.index.ranks()):
            rank = self._ranks[slot]
            if rank is not None and sum(tiers) > self._max_blocks(rank):
                excessive.append(rank.key)
                self._mark_unknown(rank)
        return excessive

    def blocks_by_rank(self) -> dict[tuple[str, int], int]:
        """Blocks in the engine's own memory, by instance and rank."""
        counted = {}
        for slot, first, *_ in struct.iter_unpack("<5I", self.index.ranks()):
            rank = self._ranks[slot]
            if rank is not None:
                counted[rank.key.instance, rank.key.rank] = int(first)
        return counted

    def _max_blocks(self, rank: RankState) -> float:
        card = self.incarnations.card(rank.key.instance)
        blocks = _max_blocks(card) if card is not None else None
        return EXCESS_FACTOR * blocks + EXCESS_BLOCKS if blocks is not None else float("inf")

    def _mark_unknown(self, rank: RankState) -> None:
        if rank.known:
            self.counts.gaps += 1
            rank.known = False
            rank.dump_requests = 0
            rank.next_request = None
            self.index.clear(rank.slot)
            self.removed.events_lost()
            self._unknown[rank.slot] = rank
            self.on_unknown()
            _abandon(rank)

    def _mark_known(self, rank: RankState) -> None:
        rank.known = True
        self._unknown.pop(rank.slot, None)

    def _mark_ranks_unknown(self, card: Instance, only_absent: bool = False) -> None:
        """Mark an instance's ranks unknown; with `only_absent`, only those without any event."""
        source = source_of_card(card)
        holder = self._holder(source, card.instance) if source else None
        if holder is None:
            return
        for number in range(rank_count(card)):
            rank = holder.ranks.get(number)
            if rank is None or not only_absent:
                self._mark_unknown(rank or self._add_rank(holder, number))

    # --- the table

    @property
    def ranks(self) -> int:
        return len(self.keys) - len(self._free)

    def rank_numbers(self) -> list[tuple[str, int]]:
        """Every (instance, rank) of the table."""
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
        """Add a rank from a snapshot; returns its slot in the index.

        Raises ValueError if the rank exists or its instance is ignored.
        """
        holder = self._holder(source, instance)
        if holder is None or number in holder.ranks:
            raise ValueError(f"rank {number} of {instance} cannot be adopted")
        rank = self._add_rank(holder, number)
        rank.next_event = next_id
        if not known:
            self._mark_unknown(rank)
        return rank.slot

    def reset(self) -> None:
        """Drop every rank; leases stay."""
        for instance in list(self._holders):
            self._drop(instance)
        self.incarnations.forget_ignored()

    def _holder(self, source: EventSource, instance: str) -> Holder | None:
        """The instance's entry, created if absent; None if a newer instance replaced it."""
        holder = self._holders.get(instance)
        if holder is not None:
            return holder
        if self.incarnations.is_ignored(instance):
            return None
        card = self.incarnations.card(instance)
        source = (source_of_card(card) if card else None) or source
        newest = self.incarnations.newest(source)
        if newest is not None and newest.instance != instance:
            self.incarnations.ignore(instance)  # until its own lease appears
            return None
        current = self._current.get(source)
        if current is not None:
            self._drop(current)
        if card is None:
            self._drop_uncarded(source.worker)
        self._current[source] = instance
        holder = self._holders[instance] = Holder(source, instance)
        return holder

    def _drop_uncarded(self, worker: str) -> None:
        """Drop a worker's instance without a lease: it may publish as many as it names models."""
        for source, instance in list(self._current.items()):
            if source.worker == worker and instance not in self.incarnations:
                self._drop(instance)

    def _drop(self, instance: str) -> None:
        self.incarnations.ignore(instance)
        holder = self._holders.pop(instance, None)
        if holder is None:
            return
        if self._current.get(holder.source) == instance:
            del self._current[holder.source]
        if all(source.worker != holder.source.worker for source in self._current):
            self._rooms.pop(holder.source.worker, None)
        for rank in holder.ranks.values():
            self._record_all(rank, holder.source.worker, self.removed.clock(), WORKER_GONE)
            _abandon(rank)
            self.index.clear(rank.slot)
            self.keys[rank.slot] = NO_RANK
            self._ranks[rank.slot] = None
            self._unknown.pop(rank.slot, None)
            heapq.heappush(self._free, rank.slot)

    def _record_all(
        self, rank: RankState, worker: str, now: float, reason: str, tier: int | None = None
    ) -> None:
        """Record all blocks of a rank, or those of one tier, as removed."""
        if not self.removed.enabled:
            return
        for segment in self.index.dump(rank.slot):
            if tier in (None, segment.tier):
                blocks = sequence_hashes(segment.local, segment.previous)
                self.removed.add(blocks, Cause(worker, segment.tier, now, reason))

    def _add_rank(self, holder: Holder, number: int) -> RankState:
        if not self._free:
            heapq.heappush(self._free, len(self.keys))
            self.keys.append(NO_RANK)
            self._ranks.append(None)
        slot = heapq.heappop(self._free)
        rank = RankState(RankKey(holder.instance, number), slot)
        self.keys[slot] = rank.key
        self._ranks[slot] = holder.ranks[number] = rank
        return rank


def _max_blocks(card: Instance) -> int | None:
    """Maximum blocks of one rank by its card, over all tiers; None if the card lacks them."""
    if card.store is not None:
        return sum(card.store.tier_blocks) if card.store.tier_blocks else None
    return card.capacity.blocks + sum(card.capacity.tier_blocks) if card.capacity else None


def _abandon(rank: RankState) -> None:
    """End a pending checkpoint of a rank that is no longer known."""
    checkpoint, rank.checkpoint = rank.checkpoint, None
    if checkpoint is not None:
        checkpoint.taken(None)


def _begins_dump(event: KvEvent | Bad) -> bool:
    return isinstance(event, Cleared) and event.tier is None
