"""The KV blocks of one rank: which exist, who uses them, and the events that tell the mesh.

A block is *private* while it fills (it has no identity and cannot be shared), then it is promoted
under its sequence hash. A full block is *active* while running sequences refer to it, *inactive*
afterwards, when it can be used again or evicted. Four signals drive it: use (take a reference),
deref (return it), destroy (drop private blocks) and promote (private becomes full).

Invariant: a block outlives none of its ancestors. A sequence refers to its whole prefix, and what
others hang on is not evicted before those.
"""

from array import array
from collections.abc import Iterator

from kvmesh.bus.messages import Cleared, KvEvent, Removed, Stored
from kvmesh.worker.enginecore.radix_tree import BlockRun, PrefixMatch, RadixTree
from kvmesh.worker.enginecore.retention import RetentionManager, RetentionOptions

ENGINE = 0
DUMP_BLOCKS = 4096
DEFAULTS = RetentionOptions()


class BlockManager:
    """At most `capacity` blocks: `active` (private ones included) and `cached`, the inactive ones.

    Prefixes are arrays of sequence hashes (typecode Q), one for each block from the first on. `now`
    is in seconds, set by whoever knows it. `retention` has the order of eviction, `tier` is that of
    the events. What is in memory `above` at the end of a session is used there.
    """

    def __init__(
        self,
        capacity: int,
        options: RetentionOptions = DEFAULTS,
        tier: int = ENGINE,
        upper_tier: "BlockManager | None" = None,
    ) -> None:
        self.capacity = capacity
        self.tier = tier
        self.active = 0
        self.cached = 0
        self.now = 0.0
        self._tree = RadixTree()
        self._upper_tier = upper_tier
        self.retention = RetentionManager(
            options, capacity, self._tree, self._evict, self._held_by_upper_tier
        )
        self._evicted_hashes = array("Q")
        self._events: list[KvEvent] = []

    @property
    def available(self) -> int:
        """Blocks that can still be allocated, by eviction if need be."""
        return self.capacity - self.active

    @property
    def contents(self) -> set[int]:
        """The hashes of all full blocks."""
        return {block for run in self._tree for block in run.hashes}

    def is_foreign(self, first: int, tenant: str) -> bool:
        """Whether another tenant's prompt begins with a block that has this hash."""
        root = self._tree.roots.get(first)
        return root is not None and root.tenant != tenant

    def holds_child(self, parent: int | None, block: int) -> bool:
        """Whether `block` is held; `parent` is the last one of a sequence's prefix."""
        return block in self._tree.children_of(self._tree.run_ending_at(parent))

    def match_prefix(self, hashes: "array[int]") -> PrefixMatch:
        """Which leading blocks of a prefix are held. Changes nothing; `lock` at once or never."""
        return self._tree.match(hashes)

    def lock(self, way: PrefixMatch) -> None:
        """Take a reference on the blocks of a way."""
        if way.unmatched:
            lower = way.runs[-1]
            way.runs[-1] = self._tree.split(lower, len(lower) - way.unmatched)
        for run in way.runs:
            if not run.refs:
                self.retention.begin_use(run, self.now)
                blocks = len(run.hashes)
                self.cached -= blocks
                self.active += blocks
            run.refs += 1

    def lock_prefix(self, hashes: "array[int]") -> int:
        """Take a reference on the leading blocks of a prefix that are held; returns how many."""
        way = self.match_prefix(hashes)
        self.lock(way)
        return way.matched

    def allocate(self, count: int) -> bool:
        """Make `count` private blocks, evicting if need be; False changes nothing: no room."""
        active = self.active + count
        if active > self.capacity:
            return False
        if active + self.cached > self.capacity:
            self.retention.evict(active + self.cached - self.capacity, self.now)
        self.active = active
        return True

    def free_private(self, count: int) -> None:
        """Drop `count` private blocks; nobody was told of them."""
        self.active -= count

    def promote(
        self,
        parent: int | None,
        salt: int,
        hashes: "array[int]",
        local: "array[int]",
        tenant: str = "",
    ) -> None:
        """Turn as many private blocks into full ones that follow `parent`, one reference each.

        A block that is held already is referred to instead; it must not be another `tenant`'s.
        """
        self.active -= len(hashes)
        before = self._tree.run_ending_at(parent)
        if hashes and hashes[0] in self._tree.children_of(before):
            way = self._tree.match(hashes, before)
            self.lock(way)
            before = way.runs[-1]
            hashes, local = hashes[way.matched :], local[way.matched :]
        if hashes:
            self._store(before, salt, hashes, local, tenant)

    def unlock(self, hashes: "array[int]", priority: int = 0) -> None:
        """Return one reference on each block of a prefix; what nobody uses becomes inactive."""
        if priority > 0:
            self.retention.raise_priority(hashes, priority, self.now)
        run = self._tree.run_ending_at(hashes[-1]) if hashes else None
        while run is not None:
            run.refs -= 1
            self.retention.end_use(run, self.now)
            if not run.refs:
                blocks = len(run.hashes)
                self.active -= blocks
                self.cached += blocks
            run = run.parent

    def clear(self, salt: int | None = None, tenant: str = "") -> int:
        """Drop every inactive block, of one namespace if told; returns how many that was."""
        return self.retention.clear(salt, tenant)

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        if self._evicted_hashes:
            self._flush_evicted()
        events, self._events = self._events, []
        return events

    def dump(self) -> list[KvEvent]:
        """A `Cleared`, then every full block, parents first."""
        return [Cleared(), *self.stored()]

    def stored(self) -> list[KvEvent]:
        """Every full block, parents first."""
        return [event for run in self._tree for event in self._stored_events(run)]

    def _store(
        self,
        before: BlockRun | None,
        salt: int,
        hashes: "array[int]",
        local: "array[int]",
        tenant: str,
    ) -> None:
        parent = None if before is None else before.hashes[-1]
        if before is not None and _is_own_end(before):
            self._tree.extend(before, hashes, local)
        else:
            self._tree.add_run(before, hashes[:], local[:], salt, tenant).refs = 1
        self.active += len(hashes)
        if self._evicted_hashes:
            self._flush_evicted()
        root_salt = salt if parent is None else 0
        self._events.append(Stored(self.tier, parent, hashes.tobytes(), local.tobytes(), root_salt))

    def _evict(self, run: BlockRun, count: int) -> None:
        self._evicted_hashes += self._tree.truncate(run, count)
        self.cached -= count

    def _flush_evicted(self) -> None:
        self._events.append(Removed(self.tier, self._evicted_hashes.tobytes()))
        self._evicted_hashes = array("Q")

    def _held_by_upper_tier(self, prompt: "array[int]") -> int:
        return self._upper_tier.match_prefix(prompt).matched if self._upper_tier is not None else 0

    def _stored_events(self, run: BlockRun) -> Iterator[Stored]:
        """A run as events of at most `DUMP_BLOCKS` blocks."""
        parent = None if run.parent is None else run.parent.hashes[-1]
        for start in range(0, len(run), DUMP_BLOCKS):
            part = slice(start, start + DUMP_BLOCKS)
            hashes, local = run.hashes[part], run.local_hashes[part]
            salt = run.salt if parent is None else 0
            yield Stored(self.tier, parent, hashes.tobytes(), local.tobytes(), salt)
            parent = hashes[-1]


def _is_own_end(run: BlockRun) -> bool:
    """Whether what its only user adds may become part of the run."""
    return run.refs == 1 and not run.children and run.retention is None
