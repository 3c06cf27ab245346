"""KV blocks of one rank: allocation, prefix matching, eviction, and the KV events of changes.

A block is *private* while it fills: it has no hash and cannot be shared. `promote` turns it into a
full block under its sequence hash. A full block is *active* while sequences hold a lock on it and
*cached* afterwards, when it can be matched again or evicted. Operations per sequence:
`match_prefix` and `lock`, `allocate`, `promote`, `unlock`, `free_private`.

Invariant: no block outlives one of its ancestors. A sequence locks its whole prefix, and a block
with held children is not evicted before them.
"""

from array import array
from collections.abc import Iterator

from kvmesh.bus.messages import EVICTED, Cleared, KvEvent, Removed, Stored
from kvmesh.retention.claims import UNCLAIMED, EvictionRank
from kvmesh.worker.enginecore.radix_tree import BlockRun, PrefixMatch, RadixTree
from kvmesh.worker.enginecore.retention import RetentionManager
from kvmesh.worker.enginecore.retention_options import RetentionOptions

ENGINE = 0
DUMP_BLOCKS = 4096
DEFAULTS = RetentionOptions()


class BlockManager:
    """At most `capacity` blocks: `active` ones (private included) and `cached` ones.

    Prefixes are arrays of sequence hashes (typecode Q), one for each block from the first on. The
    caller sets `now`, in seconds, and `request`, the request that removals are for. `retention`
    orders eviction; `tier` is the tier of the events.
    Blocks that `upper_tier` holds count as used when a session drops a prompt.
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
        self._evicted_for: tuple[str, str | None] = EVICTED, None
        self.request: str | None = None
        self._events: list[KvEvent] = []

    @property
    def available(self) -> int:
        """Blocks that can be allocated, by eviction if necessary."""
        return self.capacity - self.active

    @property
    def contents(self) -> set[int]:
        """The sequence hashes of all full blocks."""
        return {block for run in self._tree for block in run.hashes}

    def is_foreign(self, first: int, tenant: str) -> bool:
        """True if hash `first` is the first block of another tenant's prompt."""
        root = self._tree.roots.get(first)
        return root is not None and root.tenant != tenant

    def holds_child(self, parent: int | None, block: int) -> bool:
        """True if `block` is held as a child of `parent`, the last block of a locked prefix."""
        return block in self._tree.children_of(self._tree.run_ending_at(parent))

    def match_prefix(self, hashes: "array[int]") -> PrefixMatch:
        """Find the leading blocks of a prefix that are held; changes nothing.

        A match is valid until the next change: `lock` it before.
        """
        return self._tree.match(hashes)

    def eviction_rank(self, hashes: "array[int]") -> EvictionRank:
        """The position in the order of eviction of the last held block of a prefix."""
        runs = self._tree.match(hashes).runs
        return self.retention.eviction_rank(runs[-1], self.now) if runs else UNCLAIMED

    def lock(self, match: PrefixMatch) -> None:
        """Add a reference to the blocks of a match."""
        if match.unmatched:
            lower = match.runs[-1]
            match.runs[-1] = self._tree.split(lower, len(lower) - match.unmatched)
        for run in match.runs:
            if not run.refs:
                self.retention.begin_use(run, self.now)
                blocks = len(run.hashes)
                self.cached -= blocks
                self.active += blocks
            run.refs += 1

    def lock_prefix(self, hashes: "array[int]") -> int:
        """Lock the leading blocks of a prefix that are held; return their number."""
        match = self.match_prefix(hashes)
        self.lock(match)
        return match.matched

    def allocate(self, count: int, request: str | None = None) -> bool:
        """Allocate `count` private blocks for a request, evicting if necessary.

        False, without any change, if they do not fit.
        """
        active = self.active + count
        if active > self.capacity:
            return False
        if active + self.cached > self.capacity:
            self.request = request
            self.retention.evict(active + self.cached - self.capacity, self.now)
            self.request = None
        self.active = active
        return True

    def free_private(self, count: int) -> None:
        """Free `count` private blocks, which no event has announced."""
        self.active -= count

    def promote(
        self,
        parent: int | None,
        salt: int,
        hashes: "array[int]",
        local: "array[int]",
        tenant: str = "",
    ) -> None:
        """Turn private blocks into full ones that follow `parent`, with one reference each.

        A block that is held already is locked instead; it must belong to the same `tenant`.
        """
        self.active -= len(hashes)
        before = self._tree.run_ending_at(parent)
        if hashes and hashes[0] in self._tree.children_of(before):
            match = self._tree.match(hashes, before)
            self.lock(match)
            before = match.runs[-1]
            hashes, local = hashes[match.matched :], local[match.matched :]
        if hashes:
            self._store(before, salt, hashes, local, tenant)

    def unlock(self, hashes: "array[int]", priority: int = 0) -> None:
        """Drop one reference to each block of a prefix; blocks without references become cached."""
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
        """Drop all cached blocks, or those of one namespace; return their number."""
        return self.retention.clear(salt, tenant)

    def take_events(self) -> list[KvEvent]:
        """Return the changes since the last call, in order."""
        if self._evicted_hashes:
            self._flush_evicted()
        events, self._events = self._events, []
        return events

    def dump(self) -> list[KvEvent]:
        """Return a `Cleared`, then all full blocks, parents first."""
        return [Cleared(), *self.stored()]

    def stored(self) -> list[KvEvent]:
        """Return all full blocks as events, parents first."""
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
        if before is not None and _is_extendable(before):
            self._tree.extend(before, hashes, local)
        else:
            self._tree.add_run(before, hashes[:], local[:], salt, tenant).refs = 1
        self.active += len(hashes)
        if self._evicted_hashes:
            self._flush_evicted()
        root_salt = salt if parent is None else 0
        self._events.append(Stored(self.tier, parent, hashes.tobytes(), local.tobytes(), root_salt))

    def _evict(self, run: BlockRun, count: int, reason: str) -> None:
        cause = reason, self.request
        if self._evicted_hashes and cause != self._evicted_for:
            self._flush_evicted()
        self._evicted_for = cause
        self._evicted_hashes += self._tree.truncate(run, count)
        self.cached -= count

    def _flush_evicted(self) -> None:
        self._events.append(Removed(self.tier, self._evicted_hashes.tobytes(), *self._evicted_for))
        self._evicted_hashes = array("Q")

    def _held_by_upper_tier(self, prompt: "array[int]") -> int:
        return self._upper_tier.match_prefix(prompt).matched if self._upper_tier is not None else 0

    def _stored_events(self, run: BlockRun) -> Iterator[Stored]:
        """Yield a run as events of at most `DUMP_BLOCKS` blocks."""
        parent = None if run.parent is None else run.parent.hashes[-1]
        for start in range(0, len(run), DUMP_BLOCKS):
            part = slice(start, start + DUMP_BLOCKS)
            hashes, local = run.hashes[part], run.local_hashes[part]
            salt = run.salt if parent is None else 0
            yield Stored(self.tier, parent, hashes.tobytes(), local.tobytes(), salt)
            parent = hashes[-1]


def _is_extendable(run: BlockRun) -> bool:
    """True if the only user of the run may append its next blocks to it."""
    return run.refs == 1 and not run.children and run.retention is None
