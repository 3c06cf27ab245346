"""One tier with slots: allocation, retention and eviction of its copies."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from kvmesh.bus.messages import EVICTED, EXPIRED, SUPERSEDED, owner
from kvmesh.kvbm.core.blocks.block import EVICTION, Block, Copy, CopyState, DropCause
from kvmesh.kvbm.core.blocks.slab_allocator import SlabAllocator
from kvmesh.kvbm.core.errors import TooSmall
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import (
    DOUBTFUL,
    UNCLAIMED,
    BlockRetention,
    EvictionRank,
    rank_of,
)
from kvmesh.retention.eviction_pool import EvictionPool


@dataclass(slots=True)
class Operation:
    """The current operation: blocks that it touched are not evicted; `now` in seconds.

    `request` is the one that it is for, if it is known.
    """

    serial: int = 0
    now: float = 0.0
    request: str | None = None


class Tier:
    """Copies in `capacity` bytes; those without users can be evicted.

    The tier calls `on_drop` with each copy that it drops, and the cause. `tenant_share` bounds the
    share of the tier that one tenant's retention may claim.
    """

    def __init__(
        self,
        number: int,
        capacity: int,
        tenant_share: float,
        operation: Operation,
        on_drop: Callable[[Copy, DropCause], None],
    ) -> None:
        self.number = number
        self.slots = SlabAllocator(capacity)
        self._tenant_share = tenant_share
        self.copies: dict[int, Copy] = {}
        self.budget = RetentionBudget(int(capacity * tenant_share))
        self.evicted = 0
        self._operation = operation
        self._on_drop = on_drop
        self._by_digest: dict[bytes, Copy] = {}
        self._children: Counter[bytes] = Counter()
        self._fitting: dict[int, bool] = {}
        self._pools: dict[int, EvictionPool[Copy]] = {}

    def check(self, size: int) -> None:
        """Raises TooSmall if the tier cannot have slots of `size` bytes."""
        self.slots.order(size)

    def fits(self, size: int) -> bool:
        """True if the tier can have slots of `size` bytes."""
        fits = self._fitting.get(size)
        if fits is None:
            try:
                self.check(size)
            except TooSmall:
                fits = False
            else:
                fits = True
            self._fitting[size] = fits
        return fits

    def set_extent(self, extent: int) -> bool:
        """Divide the empty tier as before a restart; False if its capacity does not suit that."""
        if extent != self.slots.extent:
            if not self.slots.supports_extent(extent):
                return False
            self.slots = SlabAllocator(self.slots.capacity, extent)
            self._fitting.clear()
        return True

    def resize(self, capacity: int) -> int:
        """Change the capacity; drop copies beyond it and return their number."""
        beyond = [self.copies[slot] for slot in self.slots.resize(capacity)]
        self.budget.max_size = int(capacity * self._tenant_share)
        self._fitting.clear()
        leaving = [copy for copy in beyond if copy.state is not CopyState.DROPPED]
        self._evict(leaving, None)
        return len(leaving)

    def reserve(self, block: Block, request: str | None) -> Copy | None:
        """A staged copy with one user; evicts others for `request` if necessary.

        None if none is evictable.
        """
        size = block.space.slot_bytes
        if not self.fits(size):
            return None
        while (offset := self.slots.allocate(size)) is None:
            if not self._evict_for(size, request):
                return None
        return self._add(block, offset)

    def restore(self, block: Block, offset: int) -> Copy | None:
        """A staged copy at its offset before a restart; None if that is unavailable."""
        allocated = self.slots.allocate_at(block.space.slot_bytes, offset)
        return self._add(block, offset) if allocated else None

    def hold(self, *copies: Copy) -> None:
        """Add a user to each copy."""
        for copy in copies:
            if copy.users == 0:
                self._pool(copy).discard(copy)
            copy.users += 1

    def release(self, *copies: Copy) -> None:
        """Remove a user from each copy."""
        for copy in copies:
            copy.users -= 1
            if copy.users:
                continue
            if copy.state is CopyState.DROPPED:
                self._free(copy)
            else:
                self._pool(copy).add(copy, self._rank(copy))

    def touch(self, copies: Iterable[Copy]) -> None:
        """Record a use of these copies, in this order."""
        for slot_bytes, same in groupby(copies, key=_plain_slot_bytes):
            if slot_bytes:
                self._pool_of(slot_bytes).touch(same)
            else:
                for copy in same:
                    self._touch(copy)

    def _touch(self, copy: Copy) -> None:
        copy.lapsed = None
        if copy.retention is not None:
            self.budget.touch(copy.retention, copy.block.space.slot_bytes, self._operation.now)
            copy.retention = copy.retention or None
        pool = self._pool(copy)
        if copy in pool:
            pool.discard(copy)
            pool.add(copy, self._rank(copy))

    def update_retention(
        self, copy: Copy, change: Callable[[RetentionBudget, BlockRetention, int], object]
    ) -> None:
        """Apply `change` to the tier's budget, the copy's retention and its size."""
        retention = copy.retention or BlockRetention(owner(copy.block.tenant))
        change(self.budget, retention, copy.block.space.slot_bytes)
        copy.retention = retention if retention else None
        self.rerank(copy)

    def rerank(self, copy: Copy) -> None:
        """Take account of a change of a copy's rank."""
        if copy in self._pool(copy):
            self._pool(copy).update(copy, self._rank(copy))

    def drop(self, copy: Copy, cause: DropCause = EVICTION) -> None:
        """Remove the copy from lookups; free its slot once it has no users."""
        if copy.state is CopyState.DROPPED:
            return
        self._on_drop(copy, cause)
        copy.state = CopyState.DROPPED
        self._unlink(copy)
        if copy.users == 0:
            self._pool(copy).discard(copy)
            self._free(copy)

    def _pool(self, copy: Copy) -> EvictionPool[Copy]:
        return self._pool_of(copy.block.space.slot_bytes)

    def _pool_of(self, size: int) -> EvictionPool[Copy]:
        pool = self._pools.get(size)
        if pool is None:
            pool = self._pools[size] = EvictionPool(self._has_children, self._renew_rank)
        return pool

    def holds_child(self, digest: bytes) -> bool:
        """True if the tier has a block that is useless without that of `digest`."""
        return digest in self._children

    def _has_children(self, copy: Copy) -> bool:
        return copy.block.digest in self._children

    def _renew_rank(self, copy: Copy, now: float) -> EvictionRank:
        if copy.retention is None:
            return rank_of(UNCLAIMED, copy.block.doubtful)
        rank = self.budget.expire(copy.retention, copy.block.space.slot_bytes, now)
        if not copy.retention:
            copy.retention, copy.lapsed = None, EXPIRED
        return rank_of(rank, copy.block.doubtful)

    def _rank(self, copy: Copy) -> EvictionRank:
        retention, claimed = copy.retention, UNCLAIMED
        if retention is not None:
            claimed = retention.eviction_rank(self._operation.now)
        return rank_of(claimed, True) if copy.block.doubtful else claimed

    def _add(self, block: Block, offset: int) -> Copy:
        copy = Copy(block, self.number, offset, users=1)
        self.copies[offset] = copy
        block.copies[self.number] = copy
        self._by_digest[block.digest] = copy
        if block.parent_digest is not None:
            self._children[block.parent_digest] += 1
        return copy

    def _unlink(self, copy: Copy) -> None:
        if copy.retention is not None:
            self.budget.on_dropped(copy.retention, copy.block.space.slot_bytes)
            copy.retention = None
        del self._by_digest[copy.block.digest]
        parent = copy.block.parent_digest
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            parent_copy = self._by_digest.get(parent)
            if parent_copy is not None:
                self._pool(parent_copy).unblock(parent_copy)

    def _free(self, copy: Copy) -> None:
        del self.copies[copy.offset]
        self.slots.free(copy.offset)

    # eviction

    def displaced(self, size: int) -> Copy | None:
        """The copy that a new one of `size` bytes would displace.

        None if none may be evicted, or the first one has retention.
        """
        pool = self._pools.get(size)
        victim = self._first(pool) if pool is not None else None
        return None if victim is None or self._rank(victim) > UNCLAIMED else victim

    def _evict_for(self, size: int, request: str | None) -> bool:
        victim = self._victim(self._pools.values())
        if victim is None:
            return False
        if victim.block.space.slot_bytes == size:
            return self._evict([victim], request)
        window = self._copies_at(self.slots.window(size, victim.offset))
        if all(map(self._is_evictable, window)):
            return self._evict(window, request)
        same_size = self._victim([self._pools[size]] if size in self._pools else [])
        if same_size is not None:
            return self._evict([same_size], request)
        return self._clear_window(size, request)

    def _victim(self, pools: Iterable[EvictionPool[Copy]]) -> Copy | None:
        """The first copy to evict of several pools; None if the current operation touched it."""
        candidates = [first for pool in pools if (first := self._first(pool)) is not None]
        victim = min(candidates, key=self._precedence, default=None)
        return victim if victim is not None and self._is_evictable(victim) else None

    def _precedence(self, copy: Copy) -> tuple[EvictionRank, int]:
        """Order of the first victims of several pools, of blocks of different sizes."""
        return self._rank(copy), copy.block.last_operation

    def _first(self, pool: EvictionPool[Copy]) -> Copy | None:
        try:
            return pool.next_victim(self._operation.now)
        except IndexError:
            return None

    def _clear_window(self, size: int, request: str | None) -> bool:
        for window in self.slots.windows(size):
            copies = self._copies_at(window)
            if copies and all(map(self._is_evictable, copies)):
                return self._evict(copies, request)
        return False

    def _copies_at(self, offsets: set[int]) -> list[Copy]:
        return [self.copies[offset] for offset in offsets]

    def _is_evictable(self, copy: Copy) -> bool:
        return copy.users == 0 and copy.block.last_operation != self._operation.serial

    def _evict(self, copies: list[Copy], request: str | None) -> bool:
        self.evicted += len(copies)
        for copy in copies:
            self._renew_rank(copy, self._operation.now)
            reason = copy.lapsed or EVICTED
            if copy.block.doubtful and self._rank(copy) == DOUBTFUL:
                reason = SUPERSEDED
            cause = DropCause(reason, request)
            for expectation in copy.block.expected if len(copy.block.copies) == 1 else ():
                expectation.evicted += 1
            if copy.retention is not None:
                self.budget.on_evicted(
                    copy.retention, copy.block.space.slot_bytes, self._operation.now
                )
                copy.retention = None
            self.drop(copy, cause)
        return True


def _plain_slot_bytes(copy: Copy) -> int:
    """Bytes of the copy's slot, or 0 if the copy has or had retention."""
    is_plain = copy.retention is None and copy.lapsed is None
    return copy.block.space.slot_bytes if is_plain else 0
