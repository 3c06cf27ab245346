"""Ledger of an engine's cache: converts the engine's KV events into those of the mesh.

Engines identify blocks by their own hashes and publish their tokens; the mesh hashes the tokens
itself, under its own salt. The ledger stores each held block with its position in a prompt, so that
it can dump all blocks and does not take the removal of a second copy for a loss.

An engine's hash stands for all that precedes the block, so its position stays true after the block
is dropped, and in every tier. Engines report a block's copy in a lower tier with less than they
know of it, before its parent, or after the copy in device memory is gone: such a block gets the
position under which its hash is or was known, or waits until an event says more.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeAlias

from msgspec.structs import replace

from kvmesh.bus.messages import CLEARED, Cleared, KvEvent, Removed, Stored, Work
from kvmesh.hashing import TOKEN_BYTES, block_hashes, sequence_hashes
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
TOKENS = "tokens"  # the event has not as many as its blocks
UNKNOWN = "unknown_position"  # no event has said what precedes the block
RESET = "reset"  # the engine may have kept it below when it cleared its memory
OLD = "never_removed"  # the oldest of a tier of which the engine reports no removals


# A block's position: its parent (None: it begins a prompt), the sequence hash before it (or the
# salt), its local and its sequence hash. A tuple, as an engine stores thousands in one event.
Block: TypeAlias = tuple[int | None, int, int, int]


class CacheLedger:
    """The blocks that one rank holds; `salt_of` returns the salt of a root block.

    `counted` is for engines that may hold a block twice and publish each store and removal (vLLM
    does when equal prompts run at once); others publish one removal, however often they store.
    `kept` counts the blocks added to each tier, `dropped` those that could not be, by reason;
    `odd_size` is the last block size that is not the model's.
    """

    def __init__(self, block_size: int, salt_of: SaltFinder, counted: bool = True) -> None:
        self.block_size = block_size
        self._find_salt = salt_of
        self._counted = counted
        self._tiers: list[dict[int, int]] = [{} for _ in range(TIERS)]  # copies by engine hash
        self._blocks: dict[int, Block] = {}  # held in any tier
        self._recent: OrderedDict[int, Block] = OrderedDict()
        self._waiting = WaitingBlocks(WAITING_BLOCKS)
        self._placeable: deque[BlocksStored] = deque()
        self._chunks: dict[tuple[int, int], list[int]] = {}  # blocks by the chunk's hash and tier
        self._sequence_hashes: set[int] = set()  # of blocks in the engine's own memory
        self._removes = {0}  # tiers of which the engine reports removals
        self.kept = [0] * TIERS
        self.dropped: Counter[str] = Counter()
        self.odd_size = 0

    def __len__(self) -> int:
        """Number of blocks in the engine's own memory."""
        return len(self._tiers[0])

    def counts(self, rank: int, malformed: int, last_error: str) -> LedgerCounts:
        """The counts of a rank, with those of messages that its adapter could not decode."""
        return LedgerCounts(
            rank=rank,
            block_size=self.block_size,
            kept=list(self.kept),
            dropped={reason: count for reason, count in self.dropped.items() if count},
            unplaced=len(self._waiting),
            malformed=malformed,
            last_error=last_error,
            odd_size=self.odd_size,
        )

    def cached_tokens(self, work: Work) -> int:
        """Leading tokens of a prompt that the engine's own memory holds, in whole blocks."""
        _, sequence = block_hashes(work.tokens, self.block_size, work.salt)
        hashes = array("Q", sequence)
        count = next(
            (i for i, h in enumerate(hashes) if h not in self._sequence_hashes), len(hashes)
        )
        return count * self.block_size

    def apply(self, events: Iterable[CacheEvent]) -> list[KvEvent]:
        """Apply engine events in order; return the resulting mesh events."""
        changes: list[KvEvent] = []
        for event in events:
            changes += self._apply(event)
        return changes

    def dump(self) -> list[KvEvent]:
        """Return a `Cleared`, then all held blocks."""
        events: list[KvEvent] = [Cleared()]
        published: set[int] = set()
        for tier, held in enumerate(self._tiers):
            events += self._chains(tier, held, published)
        return events

    def clear(self) -> list[KvEvent]:
        """Clear the ledger after a restart of the engine."""
        events = self._clear(AllCleared())
        self._recent.clear()
        return events

    def _apply(self, event: CacheEvent) -> list[KvEvent]:
        if isinstance(event, BlocksStored):
            events = self._store(event)
            while self._placeable:
                events += self._store(self._placeable.popleft())
            return events + self._drop_oldest(event.tier) if event.tier else events
        if isinstance(event, BlocksRemoved):
            return self._remove(event)
        if isinstance(event, BlocksMoved):
            return self._move(event)
        return self._clear(event)

    def _move(self, event: BlocksMoved) -> list[KvEvent]:
        source = self._tiers[event.tier]
        moved = [engine_hash for engine_hash in event.hashes if engine_hash in source]
        return self._hold(event.to, moved, again=False) + self._remove(
            BlocksRemoved(event.hashes, event.tier)
        )

    def _store(self, event: BlocksStored) -> list[KvEvent]:
        if not event.hashes:
            return []
        if event.tokens and event.block_size != self.block_size:
            return self._store_chunks(event)
        if (event.tier or not event.tokens) and (known := self._known(event.hashes)):
            if len(known) == len(event.hashes):
                self._place(known)
                return self._hold(event.tier, event.hashes)
            if len(event.hashes) > 1:
                return [change for one in _single(event) for change in self._store(one)]
        if not event.tokens:
            for one in _single(event):
                self.dropped[UNKNOWN] += self._waiting.add(one, one.hashes[0])
            return []
        size = TOKEN_BYTES * self.block_size * len(event.hashes)
        if not size <= len(event.tokens) <= size + TOKEN_BYTES:
            self.dropped[TOKENS] += len(event.hashes)
            return []
        # LMCache adds the token after a chunk
        tokens = event.tokens if len(event.tokens) == size else event.tokens[:size]
        previous = self._previous(event, tokens)
        if previous is None:
            for one in _single(event):
                needed = one.hashes[0] if one.parent is None else one.parent
                self.dropped[UNKNOWN] += self._waiting.add(one, needed)
            return []
        local, sequence = block_hashes(tokens, self.block_size, previous)
        if any(event.extras):
            pairs = zip(array("Q", local), event.extras, strict=True)
            local = array("Q", [block ^ extra for block, extra in pairs]).tobytes()
            sequence = sequence_hashes(local, previous)
        hashes, sequences = event.hashes, array("Q", sequence).tolist()
        parents, before = [event.parent, *hashes], [previous, *sequences]
        rows = zip(parents, before, array("Q", local), sequences, strict=False)
        blocks: dict[int, Block] = dict(zip(hashes, rows, strict=True))
        events: list[KvEvent] = []
        if not (event.tier or self._blocks.keys().isdisjoint(hashes)):
            events = self._correct(blocks)
        self._place(blocks)
        return events + self._hold(event.tier, hashes, local)

    def _store_chunks(self, event: BlocksStored) -> list[KvEvent]:
        """Blocks of another size: each is split if it holds whole blocks of the model."""
        size = TOKEN_BYTES * event.block_size
        whole = size * len(event.hashes) <= len(event.tokens)
        count = event.block_size // self.block_size
        if not (whole and count):
            self.odd_size = event.block_size
            self.dropped[SIZE if whole else TOKENS] += len(event.hashes)
            return []
        ends_whole = event.block_size % self.block_size == 0
        used = TOKEN_BYTES * count * self.block_size
        events: list[KvEvent] = []
        parent = event.parent
        for number, chunk in enumerate(event.hashes):
            parts = [(chunk + part * _GOLDEN) & HASH_MASK for part in range(1, count + 1)]
            if ends_whole:
                parts[-1] = chunk  # so that the next chunk follows it
            self._chunks[event.tier, chunk] = parts
            tokens = event.tokens[size * number : size * number + used]
            events += self._store(
                BlocksStored(
                    *(parts, parent, tokens, self.block_size, event.tier),
                    *(event.salt, event.adapter),
                )
            )
            parent = chunk
        return events

    def _previous(self, event: BlocksStored, tokens: bytes) -> int | None:
        """The sequence hash before the first block: its parent's, or the salt; None if unknown."""
        if event.parent is not None:
            parent = self._blocks.get(event.parent) or self._recent.get(event.parent)
            return None if parent is None else parent[3]
        first = self._blocks.get(event.hashes[0]) or self._recent.get(event.hashes[0])
        if first is not None and event.salt is None:
            return first[1]
        block = tokens[: TOKEN_BYTES * self.block_size]

        def is_held(salt: int) -> bool:
            _, sequence = block_hashes(block, self.block_size, salt)
            return int.from_bytes(sequence, "little") in self._sequence_hashes

        return self._find_salt(event, is_held)

    def _known(self, hashes: list[int]) -> dict[int, Block]:
        """Those blocks whose position is known."""
        found = ((h, self._blocks.get(h) or self._recent.get(h)) for h in hashes)
        return {engine_hash: block for engine_hash, block in found if block is not None}

    def _place(self, blocks: dict[int, Block]) -> None:
        """Make positions known; blocks that wait for them can be placed next."""
        self._blocks |= blocks
        if not self._recent.keys().isdisjoint(blocks):
            for engine_hash in blocks:
                self._recent.pop(engine_hash, None)
        if len(self._waiting):
            self._placeable += self._waiting.take(blocks)

    def _hold(
        self, tier: int, hashes: list[int], local: bytes = b"", again: bool = True
    ) -> list[KvEvent]:
        """Add copies of placed blocks; `again`: a block that is there has one more copy."""
        held, blocks = self._tiers[tier], self._blocks
        if local and held.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes):
            held |= dict.fromkeys(hashes, 1)  # the usual case
            if tier == 0:
                self._sequence_hashes.update([blocks[engine_hash][3] for engine_hash in hashes])
            self.kept[tier] += len(hashes)
            return [self._stored_event(tier, hashes, local)]
        runs: list[list[int]] = [[]]
        for engine_hash in hashes:
            copies = held.get(engine_hash)
            if copies is None:
                block = blocks[engine_hash]
                if runs[-1] and block[0] != runs[-1][-1]:
                    runs.append([])
                runs[-1].append(engine_hash)
                held[engine_hash] = 1
                if tier == 0:
                    self._sequence_hashes.add(block[3])
            elif again and self._counted:
                held[engine_hash] = copies + 1
        self.kept[tier] += sum(map(len, runs))
        return [self._stored_event(tier, run) for run in runs if run]

    def _drop_oldest(self, tier: int) -> list[KvEvent]:
        """Bound a tier of which the engine reports stores alone, as some shared stores do."""
        held = self._tiers[tier]
        if tier in self._removes or len(held) <= UNREMOVED_BLOCKS:
            return []
        gone = list(islice(held, len(held) - UNREMOVED_BLOCKS))
        for engine_hash in gone:
            del held[engine_hash]
        self.dropped[OLD] += len(gone)
        self._forget(gone)
        return [Removed(tier, array("Q", gone).tobytes())]

    def _stored_event(self, tier: int, run: list[int], local: bytes = b"") -> Stored:
        parent, previous, _, _ = self._blocks[run[0]]
        packed = local or array("Q", [self._blocks[h][2] for h in run]).tobytes()
        engine = array("Q", run).tobytes()
        if parent is None:
            return Stored(tier, None, engine, packed, previous)
        if parent in self._blocks:
            return Stored(tier, parent, engine, packed)
        return Stored(tier, None, engine, packed, 0, previous)

    def _correct(self, blocks: dict[int, Block]) -> list[KvEvent]:
        """Move blocks that an event with less was misread to place, and all that follow them."""
        wrong = {
            engine_hash: block
            for engine_hash, block in blocks.items()
            if (known := self._blocks.get(engine_hash)) is not None and known[3] != block[3]
        }
        if not wrong:
            return []
        children: dict[int, list[int]] = {}
        for engine_hash, block in self._blocks.items():
            if block[0] is not None:
                children.setdefault(block[0], []).append(engine_hash)
        moved, left = dict(wrong), list(wrong)
        while left:
            parent = left.pop()
            previous = moved[parent][3]
            for child in children.get(parent, []):
                if child not in wrong:
                    local = self._blocks[child][2]
                    packed = sequence_hashes(local.to_bytes(8, "little"), previous)
                    sequence = int.from_bytes(packed, "little")
                    moved[child] = (parent, previous, local, sequence)
                    left.append(child)
        events: list[KvEvent] = []
        copies = [{h: held.pop(h) for h in moved if h in held} for held in self._tiers]
        self._sequence_hashes -= {self._blocks[engine_hash][3] for engine_hash in copies[0]}
        for tier, gone in enumerate(copies):
            if gone:
                events.append(Removed(tier, array("Q", gone).tobytes()))
        self._blocks |= moved
        self._recent.clear()
        for tier, gone in enumerate(copies):
            self.kept[tier] -= len(gone)
            events += self._hold(tier, list(gone))
            self._tiers[tier] |= gone
        return events

    def _remove(self, event: BlocksRemoved) -> list[KvEvent]:
        tiers = range(TIERS) if event.tier is None else (event.tier,)
        events: list[KvEvent] = []
        self._removes.update(tiers)
        for tier in tiers:
            hashes = self._parts(tier, event.hashes) if self._chunks else event.hashes
            if gone := self._remove_copies(tier, hashes):
                packed = array("Q", gone).tobytes()
                events.append(Removed(tier, packed, event.reason, event.request))
        return events

    def _parts(self, tier: int, hashes: list[int]) -> list[int]:
        """The blocks of chunks that lose a copy."""
        held, parts = self._tiers[tier], list[int]()
        for chunk in hashes:
            of_chunk = self._chunks.get((tier, chunk)) or [chunk]
            parts += of_chunk
            if held.get(of_chunk[0], 1) == 1:
                self._chunks.pop((tier, chunk), None)
        return parts

    def _remove_copies(self, tier: int, hashes: list[int]) -> list[int]:
        """Remove one copy of each block; returns those of which none is left."""
        held = self._tiers[tier]
        gone = []
        for engine_hash in hashes:
            copies = held.pop(engine_hash, 0)
            if copies == 1:
                gone.append(engine_hash)
            elif copies:
                held[engine_hash] = copies - 1
            else:
                self.dropped[UNKNOWN] += self._waiting.remove(engine_hash, tier)
        if tier == 0:
            self._sequence_hashes -= {self._blocks[engine_hash][3] for engine_hash in gone}
        self._forget(gone)
        return gone

    def _forget(self, hashes: list[int]) -> None:
        """Keep the positions of blocks that no tier holds any more among the recent ones."""
        held = [tier for tier in self._tiers if tier]
        recent, blocks = self._recent, self._blocks
        for engine_hash in hashes:
            for tier in held:
                if engine_hash in tier:
                    break
            else:
                recent[engine_hash] = blocks.pop(engine_hash)
        while len(recent) > RECENT_BLOCKS:
            recent.popitem(last=False)

    def _clear(self, event: AllCleared) -> list[KvEvent]:
        if event.tier == 1 and self._counted:
            self.dropped[RESET] += len(self._tiers[1])
        for tier, held in enumerate(self._tiers):
            if event.tier in (None, tier):
                gone = list(held)
                held.clear()
                self._forget(gone)
        self.dropped[UNKNOWN] += self._waiting.clear(event.tier)
        self._chunks = {
            key: parts for key, parts in self._chunks.items() if event.tier not in (None, key[0])
        }
        if event.tier in (None, 0):
            self._sequence_hashes.clear()
        return [Cleared(event.tier, CLEARED)]

    def _chains(self, tier: int, held: dict[int, int], published: set[int]) -> Iterator[Stored]:
        run: list[int] = []
        for engine_hash in held:
            if run and self._blocks[engine_hash][0] != run[-1]:
                yield self._dumped(tier, run, published)
                run = []
            run.append(engine_hash)
        if run:
            yield self._dumped(tier, run, published)

    def _dumped(self, tier: int, run: list[int], published: set[int]) -> Stored:
        parent, previous, _, _ = self._blocks[run[0]]
        stored = self._stored_event(tier, run)
        if parent is not None and parent not in published:
            stored = Stored(tier, None, stored.engine, stored.local, 0, previous)
        published.update(run)
        return stored


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
