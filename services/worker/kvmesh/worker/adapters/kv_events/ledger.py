"""Ledger of an engine's cache: converts the engine's KV events into those of the mesh.

Engines identify blocks by their own hashes and publish their tokens; the mesh hashes the tokens
itself, under its own salt. The ledger stores each held block with its position in a prompt, so that
it can dump all blocks and does not take the removal of a second copy for a loss.

An engine's hash stands for all that precedes the block, so its position stays true after the block
is dropped, and in every tier. Engines report a block's copy in a lower tier with less than they
know of it, before its parent, or after the copy in device memory is gone: such a block gets the
position under which its hash is or was known, or waits until an event says more.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeAlias

from msgspec.structs import replace

from kvmesh._native import EngineBlocks
from kvmesh.bus.messages import CLEARED, Cleared, KvEvent, Removed, Stored, Work
from kvmesh.hashing import TOKEN_BYTES, block_hashes
from kvmesh.index import TIERS
from kvmesh.worker.adapters.kv_events.cache_events import (
    HASH_MASK,
    AllCleared,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
)
from kvmesh.worker.adapters.kv_events.salts import SaltFinder
from kvmesh.worker.adapters.kv_events.waiting import WaitingBlocks
from kvmesh.worker.enginecore.counters import LedgerCounts

RECENT_BLOCKS = 65_536  # of which the ledger remembers the position after the engine drops them
WAITING_BLOCKS = 8_192
UNREMOVED_BLOCKS = 65_536  # in a lower tier of which the engine has never reported a removal
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio

# reasons for which blocks are not in the index
SIZE = "block_size"  # not that of the model's blocks
PART = "part_of_block"  # beside whole blocks, as vLLM tells of a hybrid model's states
TOKENS = "tokens"  # the event has more or fewer than its blocks
UNKNOWN = "unknown_position"  # no event has said what precedes the block
RESET = "reset"  # the engine may have kept it below when it cleared its memory or restarted
OLD = "never_removed"  # the oldest of a tier of which the engine reports no removals

Run: TypeAlias = tuple[int | None, bytes, bytes, int, int | None]  # a `Stored` after its tier
Moves: TypeAlias = list[tuple[int, bytes, list[Run]]]  # by tier: packed names, and runs of them


class CacheLedger:
    """The blocks that one rank holds; `salt_of` returns the salt of a root block.

    `counted` is for engines that may hold a block twice and publish each store and removal (vLLM
    does when equal prompts run at once); others publish one removal, however often they store.
    `dropped` counts the blocks that could not be added, by reason and tier; `odd_size` is the last
    block size that is not the model's.
    """

    def __init__(self, block_size: int, salt_of: SaltFinder, counted: bool = True) -> None:
        self.block_size = block_size
        self._find_salt = salt_of
        self._counted = counted
        self._blocks = EngineBlocks(RECENT_BLOCKS, counted)
        self._waiting = WaitingBlocks(WAITING_BLOCKS)
        self._placeable: deque[BlocksStored] = deque()
        self._chunks: dict[tuple[int, str, int], list[int]] = {}  # blocks by tier, store and chunk
        self._removes = {(0, "")}  # tiers and their stores of which the engine reports removals
        # copies of blocks in the others, oldest first
        self._order: dict[tuple[int, str], dict[int, int]] = {}
        self.dropped: dict[str, list[int]] = {}
        self.odd_size = 0

    def __len__(self) -> int:
        """Number of blocks in the engine's own memory."""
        return self._blocks.held(0)

    def counts(self, rank: int, malformed: int, last_error: str) -> LedgerCounts:
        """The counts of a rank, with those of messages that its adapter could not decode."""
        return LedgerCounts(
            rank=rank,
            block_size=self.block_size,
            kept=self._blocks.kept(),
            dropped={reason: list(tiers) for reason, tiers in self.dropped.items()},
            unplaced=len(self._waiting),
            malformed=malformed,
            last_error=last_error,
            odd_size=self.odd_size,
        )

    def cached_tokens(self, work: Work) -> int:
        """Leading tokens of a prompt that the engine's own memory holds, in whole blocks."""
        _, sequence = block_hashes(work.tokens, self.block_size, work.salt)
        return self._blocks.leading(sequence) * self.block_size

    def apply(self, events: Iterable[CacheEvent]) -> list[KvEvent]:
        """Apply engine events in order; return the resulting mesh events."""
        changes: list[KvEvent] = []
        for event in events:
            changes += self._apply(event)
        return changes

    def dump(self) -> list[KvEvent]:
        """Return a `Cleared`, then all held blocks."""
        events: list[KvEvent] = [Cleared()]
        for tier, runs in enumerate(self._blocks.dump()):
            events += [Stored(tier, *run) for run in runs]
        return events

    def clear(self) -> list[KvEvent]:
        """Clear the ledger after a restart of the engine, which may find its files again."""
        for tier in range(2, TIERS):
            self._drop(RESET, tier, self._blocks.held(tier))
        events = self._clear(AllCleared())
        self._blocks.forget()
        return events

    def _apply(self, event: CacheEvent) -> list[KvEvent]:
        if isinstance(event, BlocksStored):
            events = self._store(event)
            while self._placeable:
                events += self._store(self._placeable.popleft())
            return events + self._drop_oldest(event) if event.tier else events
        if isinstance(event, BlocksRemoved):
            return self._remove(event)
        if isinstance(event, BlocksMoved):
            return self._move(event)
        return self._clear(event)

    def _drop(self, reason: str, tier: int, count: int) -> None:
        if count:
            self.dropped.setdefault(reason, [0] * TIERS)[tier] += count

    def _wait(self, one: BlocksStored, needed: int) -> None:
        """Let the one block of an event wait; the oldest that waits is given up for it."""
        given_up = self._waiting.add(one, needed)
        if given_up is not None:
            self._drop(UNKNOWN, given_up, 1)

    def _move(self, event: BlocksMoved) -> list[KvEvent]:
        if len(self._waiting):
            for name in event.hashes:
                self._waiting.move(name, event.tier, event.to)
        moved = [name for name in event.hashes if self._blocks.copies(event.tier, name)]
        return self._hold(event.to, "", moved, again=self._counted) + self._remove(
            BlocksRemoved(event.hashes, event.tier)
        )

    def _store(self, event: BlocksStored) -> list[KvEvent]:
        if not event.hashes:
            return []
        if event.tokens and event.block_size != self.block_size:
            return self._store_chunks(event)
        if (event.tier or not event.tokens) and (known := self._blocks.known(event.hashes)):
            if known == len(event.hashes):
                return self._hold(event.tier, event.source, event.hashes)
            if len(event.hashes) > 1:
                return [change for one in _single(event) for change in self._store(one)]
        if not event.tokens:
            for one in _single(event):
                self._wait(one, one.hashes[0])
            return []
        size = TOKEN_BYTES * self.block_size * len(event.hashes)
        if not size <= len(event.tokens) <= size + TOKEN_BYTES:
            self._drop(TOKENS, event.tier, len(event.hashes))
            return []
        # LMCache adds the token after a chunk
        tokens = event.tokens if len(event.tokens) == size else event.tokens[:size]
        salt = self._salt(event, tokens) if event.parent is None else 0
        stored = salt is not None and self._blocks.store(
            event.tier, event.hashes, event.parent, salt, tokens, event.extras
        )
        if not stored:
            for one in _single(event):
                self._wait(one, one.hashes[0] if one.parent is None else one.parent)
            return []
        runs, moved = stored
        added = self._held(event.tier, event.source, event.hashes, runs)
        return [*_moves(moved), *added] if moved else added

    def _store_chunks(self, event: BlocksStored) -> list[KvEvent]:
        """Blocks of another size: each is split if it holds whole blocks of the model."""
        size = TOKEN_BYTES * event.block_size
        needed = size * len(event.hashes)
        whole = needed <= len(event.tokens) <= needed + TOKEN_BYTES  # as below
        count = event.block_size // self.block_size
        if whole and len(event.hashes) == 1 and not count and self._blocks.kept()[event.tier]:
            self._drop(PART, event.tier, 1)
            return []
        if not (whole and count):
            self.odd_size = event.block_size
            self._drop(SIZE if whole else TOKENS, event.tier, len(event.hashes))
            return []
        ends_whole = event.block_size % self.block_size == 0
        used = TOKEN_BYTES * count * self.block_size
        events: list[KvEvent] = []
        parent = event.parent
        for number, chunk in enumerate(event.hashes):
            parts = [(chunk + part * _GOLDEN) & HASH_MASK for part in range(1, count + 1)]
            if ends_whole:
                parts[-1] = chunk  # so that the next chunk follows it
            self._chunks[event.tier, event.source, chunk] = parts
            tokens = event.tokens[size * number : size * number + used]
            extras = event.extras[number : number + 1] * count
            events += self._store(
                BlocksStored(
                    *(parts, parent, tokens, self.block_size, event.tier),
                    *(event.salt, event.adapter, extras, event.source),
                )
            )
            parent = chunk
        return events

    def _salt(self, event: BlocksStored, tokens: bytes) -> int | None:
        """The salt of a root block; None if it is not known yet."""
        first = self._blocks.position(event.hashes[0])
        if first is not None and event.salt is None:
            return first[0]
        block = tokens[: TOKEN_BYTES * self.block_size]

        def is_held(salt: int) -> bool:
            _, sequence = block_hashes(block, self.block_size, salt)
            return self._blocks.leading(sequence) > 0

        return self._find_salt(event, is_held)

    def _hold(self, tier: int, source: str, hashes: list[int], again: bool = True) -> list[KvEvent]:
        """Add copies of known blocks; `again`: a block that is there has one more copy."""
        return self._held(tier, source, hashes, self._blocks.hold(tier, hashes, again))

    def _held(self, tier: int, source: str, hashes: list[int], runs: list[Run]) -> list[KvEvent]:
        """The events of blocks that are held now; those that wait for them can be placed next."""
        if len(self._waiting):
            self._placeable += self._waiting.take(hashes)
        if tier and (tier, source) not in self._removes:
            order = self._order.setdefault((tier, source), {})
            for name in hashes:
                order[name] = order.get(name, 0) + 1
        return [Stored(tier, *run) for run in runs]

    def _drop_oldest(self, event: BlocksStored) -> list[KvEvent]:
        """Bound a store of which the engine reports no removals, as of some shared ones."""
        tier = event.tier
        order = self._order.get((tier, event.source), {})
        excess = len(order) - UNREMOVED_BLOCKS
        if not order or excess <= 0:
            return []
        names = list(islice(order, excess))
        copies = [name for name in names for _ in range(order.pop(name))]
        gone, _ = self._blocks.release(tier, copies)
        self._drop(OLD, tier, len(names))
        return [Removed(tier, gone)]

    def _remove(self, event: BlocksRemoved) -> list[KvEvent]:
        tiers = range(TIERS) if event.tier is None else (event.tier,)
        events: list[KvEvent] = []
        for tier in tiers:
            self._removes.add((tier, event.source))
            self._order.pop((tier, event.source), None)
        for tier in tiers:
            hashes = self._parts(tier, event) if self._chunks else event.hashes
            gone, missing = self._blocks.release(tier, hashes)
            if len(self._waiting):
                gone_waiting = sum(self._waiting.remove(name, tier) for name in missing)
                self._drop(UNKNOWN, tier, gone_waiting)
            if gone:
                events.append(Removed(tier, gone, event.reason, event.request))
        return events

    def _parts(self, tier: int, event: BlocksRemoved) -> list[int]:
        """The blocks of chunks that lose a copy in the event's store."""
        parts: list[int] = []
        lost: Counter[int] = Counter()
        for chunk in event.hashes:
            key = tier, event.source, chunk
            of_chunk = self._chunks.get(key) or [chunk]
            parts += of_chunk
            lost[chunk] += 1
            if self._blocks.copies(tier, of_chunk[0]) <= lost[chunk]:
                self._chunks.pop(key, None)
        return parts

    def _clear(self, event: AllCleared) -> list[KvEvent]:
        for tier in range(TIERS) if event.tier is None else (event.tier,):
            if event.maybe and self._counted:
                self._drop(RESET, tier, self._blocks.held(tier))
            self._blocks.clear(tier)
        for tier, count in self._waiting.clear(event.tier).items():
            self._drop(UNKNOWN, tier, count)
        self._order = {
            key: order for key, order in self._order.items() if event.tier not in (None, key[0])
        }
        self._chunks = {
            key: parts for key, parts in self._chunks.items() if event.tier not in (None, key[0])
        }
        return [Cleared(event.tier, CLEARED)]


def _moves(moved: Moves) -> Iterator[KvEvent]:
    """The events of blocks that an event with less was misread to place."""
    for tier, gone, _ in moved:
        yield Removed(tier, gone)
    for tier, _, runs in moved:
        for run in runs:
            yield Stored(tier, *run)


def _single(event: BlocksStored) -> Iterator[BlocksStored]:
    """The event's blocks one by one."""
    size, parent = TOKEN_BYTES * event.block_size, event.parent
    for number, engine_hash in enumerate(event.hashes):
        tokens = event.tokens[size * number : size * (number + 1)]
        yield replace(
            event,
            hashes=[engine_hash],
            parent=parent,
            tokens=tokens,
            extras=event.extras[number : number + 1],
        )
        parent = engine_hash
