"""Ledger of an engine's cache: converts the engine's KV events into those of the mesh.

Engines identify blocks by their own hashes and publish their tokens; the mesh hashes the tokens
itself, under its own salt. The ledger stores each held block with its position in a prompt, so that
it can dump all blocks and does not take the removal of a second copy for a loss.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvmesh.bus.messages import CLEARED, Cleared, KvEvent, Removed, Stored, Work
from kvmesh.hashing import block_hashes, salt
from kvmesh.index import TIERS
from kvmesh.runtime.lru import LruCache

HASH_MASK = (1 << 64) - 1
_HEX = frozenset("0123456789abcdef")
_MEDIA = {
    "GPU": 0,
    "CPU": 1,
    "CPU_PINNED": 1,
    "CPU_TIER1": 1,
    "CPU_TIER2": 2,
    "DISK": 2,
    "NVME": 2,
    "STORAGE": 2,
}


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks now held after `parent`; `tokens` is packed uint32.

    `salt` is the mesh's, if the engine's event carries it; `adapter` is a LoRA adapter's name.
    """

    hashes: list[int]
    parent: int | None
    tokens: bytes
    block_size: int
    tier: int = 0
    salt: int | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks no longer held in `tier` (None: in any); reason and request are as in `Removed`."""

    hashes: list[int]
    tier: int | None = 0
    reason: str | None = None
    request: str | None = None


@dataclass(frozen=True, slots=True)
class AllCleared:
    """All blocks of `tier` (None: of every tier) are gone."""

    tier: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksMoved:
    """Blocks now held in tier `to` and no longer in `tier`."""

    hashes: list[int]
    tier: int
    to: int


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksMoved | AllCleared


def fold_hash(value: int | bytes) -> int:
    """An engine's block hash as a uint64: integers modulo 2**64, digests by their last 8 bytes.

    vLLM publishes a digest or, as an integer, the same last 8 bytes; SGLang signed integers.
    """
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    return value & HASH_MASK


def medium_tier(medium: str | None) -> int:
    """The tier of a storage medium as engines name it; media outside the node are tier 3."""
    return 0 if medium is None else _MEDIA.get(medium.upper(), 3)


def returned_salt(key: str) -> int | None:
    """The mesh's salt in an engine's cache salt, see `PromptSalts.cache_salt`; None if none."""
    digits = key.rpartition("-")[2]
    return int(digits, 16) if len(digits) == 16 and set(digits) <= _HEX else None


class PromptSalts:
    """The salts of recent prompts, for engines whose events do not carry a salt.

    Prompts that came over the mesh are known by their first block, the newest `limit` of them.
    Other prompts came to the engine directly and have the model's salt without a tenant. If tenants
    share a first block, the one that waited longest without holding it is chosen.
    """

    def __init__(self, model: str, block_size: int, limit: int = 65536) -> None:
        self._model = model
        self._block_size = block_size
        self._limit = limit
        self._waiting: LruCache[int, list[int]] = LruCache(limit)
        self._tenants: OrderedDict[int, str | None] = OrderedDict()

    def is_exclusive(self, work: Work) -> bool:
        """True if no other tenant has used this salt: all blocks under it are this tenant's."""
        plain = work.salt == salt(self._model, work.adapter or "")
        known = self._tenants.pop(work.salt, "" if plain else work.tenant)
        self._tenants[work.salt] = known if known == work.tenant else None
        if len(self._tenants) > self._limit:
            self._tenants.popitem(last=False)
        return known == work.tenant

    def cache_salt(self, work: Work) -> str | None:
        """The salt for the engine's own hashes; None for a prompt without a tenant.

        The tenant's tag isolates its blocks. The mesh's salt follows as 16 hexadecimal digits,
        which the engine's events return. vLLM's server accepts no "/", which occurs in the tag of a
        part of a tenant.
        """
        if work.tenant:
            return f"{work.tenant.replace('/', '.')}-{work.salt:016x}"
        plain = salt(self._model, work.adapter or "")
        return None if work.salt == plain else f"{work.salt:016x}"

    def remember(self, work: Work) -> None:
        """Record the salt of a prompt under its first block."""
        local, _ = block_hashes(work.tokens[: 4 * self._block_size], self._block_size)
        if local:
            key = int.from_bytes(local, "little")
            salts = self._waiting.peek(key) or []
            if work.salt not in salts:
                salts.append(work.salt)
            self._waiting.put(key, salts)

    def root_salt(self, event: BlocksStored, held: Callable[[int], bool]) -> int:
        """The salt of a root block; `held(salt)`: the block is held under that salt already."""
        if event.salt is not None:
            return event.salt
        local, _ = block_hashes(event.tokens[: 4 * event.block_size], event.block_size)
        salts = (self._waiting.peek(int.from_bytes(local, "little")) if local else None) or []
        found = next((salt_ for salt_ in salts if not held(salt_)), None)
        if found is None:
            return salt(self._model, event.adapter or "")
        salts.remove(found)
        return found


SaltFinder: TypeAlias = Callable[[BlocksStored, Callable[[int], bool]], int]


class _Block:
    __slots__ = ("copies", "is_root", "local_hash", "parent", "previous_hash", "sequence_hash")

    def __init__(
        self,
        is_root: bool,
        parent: int | None,
        previous_hash: int,
        local_hash: int,
        sequence_hash: int,
    ) -> None:
        self.is_root = is_root
        self.parent = parent
        self.previous_hash = previous_hash
        self.local_hash = local_hash
        self.sequence_hash = sequence_hash
        self.copies = 1


class CacheLedger:
    """The blocks that one rank holds; `salt_of` returns the salt of a root block.

    `counted` is for engines that may hold a block twice and publish each store and removal (vLLM
    does when equal prompts run at once); others publish one removal, however often they store.
    `dropped_blocks` counts blocks not published: of another size, or after a parent that is not
    held.
    """

    def __init__(self, block_size: int, salt_of: SaltFinder, counted: bool = True) -> None:
        self._block_size = block_size
        self._find_salt = salt_of
        self._counted = counted
        self._tiers: list[dict[int, _Block]] = [{} for _ in range(TIERS)]
        self._sequence_hashes: set[int] = set()
        self.dropped_blocks = 0

    def __len__(self) -> int:
        """Number of blocks in the engine's own memory."""
        return len(self._tiers[0])

    def cached_tokens(self, work: Work) -> int:
        """Leading tokens of a prompt that the engine's own memory holds, in whole blocks."""
        _, sequence = block_hashes(work.tokens, self._block_size, work.salt)
        hashes = array("Q", sequence)
        count = next(
            (i for i, h in enumerate(hashes) if h not in self._sequence_hashes), len(hashes)
        )
        return count * self._block_size

    def apply(self, events: Iterable[CacheEvent]) -> list[KvEvent]:
        """Apply engine events in order; return the resulting mesh events."""
        return [change for event in events for change in self._apply(event)]

    def dump(self) -> list[KvEvent]:
        """Return a `Cleared`, then all held blocks."""
        events: list[KvEvent] = [Cleared()]
        published: set[int] = set()
        for tier, held in enumerate(self._tiers):
            events += self._chains(tier, held, published)
        return events

    def clear(self) -> list[KvEvent]:
        """Clear the ledger after a restart of the engine."""
        return self._clear(AllCleared())

    def _apply(self, event: CacheEvent) -> list[KvEvent]:
        if isinstance(event, BlocksStored):
            return self._store(event)
        if isinstance(event, BlocksRemoved):
            return self._remove(event)
        if isinstance(event, BlocksMoved):
            return self._move(event)
        return self._clear(event)

    def _move(self, event: BlocksMoved) -> list[KvEvent]:
        source, target = self._tiers[event.tier], self._tiers[event.to]
        events: list[KvEvent] = []
        for engine_hash in event.hashes:
            block = source.get(engine_hash)
            if block is not None and engine_hash not in target:
                parent_held = any(block.parent in held for held in self._tiers)
                target[engine_hash] = _Block(
                    block.is_root,
                    block.parent,
                    block.previous_hash,
                    block.local_hash,
                    block.sequence_hash,
                )
                if event.to == 0:
                    self._sequence_hashes.add(block.sequence_hash)
                events.append(self._stored_event(event.to, target, [engine_hash], not parent_held))
        return events + self._remove(BlocksRemoved(event.hashes, event.tier))

    def _store(self, event: BlocksStored) -> list[KvEvent]:
        whole = len(event.tokens) == 4 * event.block_size * len(event.hashes)
        fits = whole and event.block_size == self._block_size
        # vLLM announces offloaded blocks that it cannot describe with size 0 and without tokens
        previous = self._previous_hash(event) if fits else None
        if previous is None:
            self.dropped_blocks += len(event.hashes)
            return []
        local, sequence = block_hashes(event.tokens, self._block_size, previous)
        rows = zip(event.hashes, array("Q", local), array("Q", sequence), strict=True)
        held = self._tiers[event.tier]
        runs: list[list[int]] = [[]]
        parent, root = event.parent, event.parent is None
        for engine_hash, block_local, block_sequence in rows:
            known = held.get(engine_hash)
            if known is None:
                held[engine_hash] = _Block(root, parent, previous, block_local, block_sequence)
                runs[-1].append(engine_hash)
                if event.tier == 0:
                    self._sequence_hashes.add(block_sequence)
            else:
                known.copies += self._counted
                runs.append([])
            parent, previous, root = engine_hash, block_sequence, False
        return [self._stored_event(event.tier, held, run) for run in runs if run]

    def _previous_hash(self, event: BlocksStored) -> int | None:
        if event.parent is None:
            return self._root_salt(event)
        for held in (self._tiers[event.tier], *self._tiers):
            if event.parent in held:
                return held[event.parent].sequence_hash
        return None

    def _root_salt(self, event: BlocksStored) -> int:
        for held in self._tiers:
            if event.hashes and event.hashes[0] in held:
                return held[event.hashes[0]].previous_hash
        first = event.tokens[: 4 * self._block_size]

        def is_held(salt: int) -> bool:
            _, sequence = block_hashes(first, self._block_size, salt)
            return int.from_bytes(sequence[:8], "little") in self._sequence_hashes

        return self._find_salt(event, is_held)

    def _stored_event(
        self, tier: int, held: dict[int, _Block], run: list[int], detached: bool = False
    ) -> Stored:
        first = held[run[0]]
        return Stored(
            tier,
            None if first.is_root or detached else first.parent,
            array("Q", run).tobytes(),
            array("Q", [held[engine_hash].local_hash for engine_hash in run]).tobytes(),
            first.previous_hash if first.is_root else 0,
            first.previous_hash if detached and not first.is_root else None,
        )

    def _remove(self, event: BlocksRemoved) -> list[KvEvent]:
        tiers = range(TIERS) if event.tier is None else (event.tier,)
        events: list[KvEvent] = []
        for tier in tiers:
            gone = [
                engine_hash for engine_hash in event.hashes if self._remove_copy(tier, engine_hash)
            ]
            if gone:
                packed = array("Q", gone).tobytes()
                events.append(Removed(tier, packed, event.reason, event.request))
        return events

    def _remove_copy(self, tier: int, engine_hash: int) -> bool:
        block = self._tiers[tier].get(engine_hash)
        if block is None:
            return False
        block.copies -= 1
        if not block.copies:
            del self._tiers[tier][engine_hash]
            if tier == 0:
                self._sequence_hashes.discard(block.sequence_hash)
        return not block.copies

    def _clear(self, event: AllCleared) -> list[KvEvent]:
        for tier, held in enumerate(self._tiers):
            if event.tier in (None, tier):
                held.clear()
        if event.tier in (None, 0):
            self._sequence_hashes.clear()
        return [Cleared(event.tier, CLEARED)]

    def _chains(self, tier: int, held: dict[int, _Block], published: set[int]) -> Iterator[Stored]:
        run: list[int] = []
        detached = False
        for engine_hash, block in held.items():
            if run and block.parent != run[-1]:
                yield self._stored_event(tier, held, run, detached)
                run = []
            if not run:
                detached = block.parent not in published
            run.append(engine_hash)
            published.add(engine_hash)
        if run:
            yield self._stored_event(tier, held, run, detached)
