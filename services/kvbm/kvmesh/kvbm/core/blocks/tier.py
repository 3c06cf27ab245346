"""One tier with slots: who has which, and who leaves when there is no room."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from kvmesh.bus.messages import owner
from kvmesh.kvbm.core.blocks.block import Block, Copy, CopyState
from kvmesh.kvbm.core.blocks.slab_allocator import SlabAllocator
from kvmesh.kvbm.core.errors import TooSmall
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import UNCLAIMED, BlockRetention, EvictionRank
from kvmesh.retention.eviction_pool import EvictionPool


@dataclass(slots=True)
class EvictionTurn:
    """The operation that runs: what it has touched is not evicted for it. `now` is seconds."""

    serial: int = 0
    now: float = 0.0


class Tier:
    """Copies in `capacity` bytes; those that nobody uses may be evicted.

    `on_drop` is called with each copy that nobody can find any more. `budget` is the share of the
    tier that one tenant may have kept beyond its turn.
    """

    def __init__(
        self,
        number: int,
        capacity: int,
        budget: float,
        turn: EvictionTurn,
        on_drop: Callable[[Copy], None],
    ) -> None:
        self.number = number
        self.slots = SlabAllocator(capacity)
        self._budget = budget
        self.copies: dict[int, Copy] = {}
        self.promises = RetentionBudget(int(capacity * budget))
        self.evicted = 0
        self._turn = turn
        self._on_drop = on_drop
        self._by_digest: dict[bytes, Copy] = {}
        self._behind: Counter[bytes] = Counter()
        self._fitting: dict[int, bool] = {}
        self._idle: dict[int, EvictionPool[Copy]] = {}

    def check(self, size: int) -> None:
        """Raises TooSmall if slots of `size` bytes cannot be had here."""
        self.slots.order(size)

    def fits(self, size: int) -> bool:
        """Whether slots of `size` bytes can be had here."""
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

    def divide(self, extent: int) -> bool:
        """Divide it, while it is empty, as it was before a restart; False if it is too small."""
        if extent != self.slots.extent:
            if not self.slots.can_have(extent):
                return False
            self.slots = SlabAllocator(self.slots.capacity, extent)
            self._fitting.clear()
        return True

    def resize(self, capacity: int) -> int:
        """There are fewer bytes, or more again; drops what is beyond, and returns how much."""
        beyond = [self.copies[slot] for slot in self.slots.resize(capacity)]
        self.promises.max_size = int(capacity * self._budget)
        self._fitting.clear()
        leaving = [copy for copy in beyond if copy.state is not CopyState.DROPPED]
        self._evict(leaving)
        return len(leaving)

    def reserve(self, block: Block) -> Copy | None:
        """A staged copy, used once, perhaps in place of others; None if none may leave."""
        size = block.space.slot
        if not self.fits(size):
            return None
        while (offset := self.slots.take(size)) is None:
            if not self._make_room(size):
                return None
        return self._add(block, offset)

    def restore(self, block: Block, offset: int) -> Copy | None:
        """A staged copy where it was before a restart; None if it cannot be there."""
        claimed = self.slots.claim(block.space.slot, offset)
        return self._add(block, offset) if claimed else None

    def hold(self, *copies: Copy) -> None:
        """One more uses each of them."""
        for copy in copies:
            if copy.users == 0:
                self._pool(copy).discard(copy)
            copy.users += 1

    def release(self, *copies: Copy) -> None:
        """One less uses each of them."""
        for copy in copies:
            copy.users -= 1
            if copy.users:
                continue
            if copy.state is CopyState.DROPPED:
                self._free(copy)
            else:
                self._pool(copy).add(copy, self._standing(copy))

    def touch(self, copies: Iterable[Copy]) -> None:
        """They were asked for, in this order."""
        for slot, alike in groupby(copies, key=_plain_slot):
            if slot:
                self._pool_of(slot).touch(alike)
            else:
                for copy in alike:
                    self._touch(copy)

    def _touch(self, copy: Copy) -> None:
        if copy.keep is not None:
            self.promises.touch(copy.keep, copy.block.space.slot, self._turn.now)
        pool = self._pool(copy)
        if copy in pool:
            pool.discard(copy)
            pool.add(copy, self._standing(copy))

    def change(
        self, copy: Copy, change: Callable[[RetentionBudget, BlockRetention, int], object]
    ) -> None:
        """Ask something else for it: `change` gets the tier's promises, the keep and its size."""
        keep = copy.keep or BlockRetention(owner(copy.block.tenant))
        change(self.promises, keep, copy.block.space.slot)
        copy.keep = keep if keep else None
        if copy in self._pool(copy):
            self._pool(copy).update(copy, self._standing(copy))

    def drop(self, copy: Copy) -> None:
        """Nobody finds it any more; the slot is free once nobody uses it."""
        if copy.state is CopyState.DROPPED:
            return
        self._on_drop(copy)
        copy.state = CopyState.DROPPED
        self._forget(copy)
        if copy.users == 0:
            self._pool(copy).discard(copy)
            self._free(copy)

    def _pool(self, copy: Copy) -> EvictionPool[Copy]:
        return self._pool_of(copy.block.space.slot)

    def _pool_of(self, size: int) -> EvictionPool[Copy]:
        pool = self._idle.get(size)
        if pool is None:
            pool = self._idle[size] = EvictionPool(self._carries, self._renewed)
        return pool

    def _carries(self, copy: Copy) -> bool:
        return self._behind[copy.block.digest] > 0

    def _renewed(self, copy: Copy, now: float) -> EvictionRank:
        if copy.keep is None:
            return UNCLAIMED
        return self.promises.expire(copy.keep, copy.block.space.slot, now)

    def _standing(self, copy: Copy) -> EvictionRank:
        return copy.keep.eviction_rank(self._turn.now) if copy.keep is not None else UNCLAIMED

    def _add(self, block: Block, offset: int) -> Copy:
        copy = Copy(block, self.number, offset, users=1)
        self.copies[offset] = copy
        block.copies[self.number] = copy
        self._by_digest[block.digest] = copy
        if block.parent is not None:
            self._behind[block.parent] += 1
        return copy

    def _forget(self, copy: Copy) -> None:
        if copy.keep is not None:
            self.promises.on_dropped(copy.keep, copy.block.space.slot)
            copy.keep = None
        del self._by_digest[copy.block.digest]
        parent = copy.block.parent
        if parent is None:
            return
        self._behind[parent] -= 1
        if not self._behind[parent]:
            del self._behind[parent]
            before = self._by_digest.get(parent)
            if before is not None:
                self._pool(before).unblock(before)

    def _free(self, copy: Copy) -> None:
        del self.copies[copy.offset]
        self.slots.give(copy.offset)

    # who leaves

    def _make_room(self, size: int) -> bool:
        victim = self._victim(self._idle.values())
        if victim is None:
            return False
        if victim.block.space.slot == size:
            return self._evict([victim])
        around = self._copies_of(self.slots.window(size, victim.offset))
        if all(map(self._may_leave, around)):
            return self._evict(around)
        own = self._victim([self._idle[size]] if size in self._idle else [])
        return self._evict([own]) if own is not None else self._clear_window(size)

    def _victim(self, pools: Iterable[EvictionPool[Copy]]) -> Copy | None:
        """The first to go of several pools, unless the operation that runs has touched it."""
        firsts = [first for pool in pools if (first := self._first(pool)) is not None]
        victim = min(firsts, key=lambda c: (self._standing(c), c.block.touched), default=None)
        return victim if victim is not None and self._may_leave(victim) else None

    def _first(self, pool: EvictionPool[Copy]) -> Copy | None:
        try:
            return pool.next_victim(self._turn.now)
        except IndexError:
            return None

    def _clear_window(self, size: int) -> bool:
        for window in self.slots.windows(size):
            copies = self._copies_of(window)
            if copies and all(map(self._may_leave, copies)):
                return self._evict(copies)
        return False

    def _copies_of(self, offsets: set[int]) -> list[Copy]:
        return [self.copies[offset] for offset in offsets]

    def _may_leave(self, copy: Copy) -> bool:
        return copy.users == 0 and copy.block.touched != self._turn.serial

    def _evict(self, copies: list[Copy]) -> bool:
        self.evicted += len(copies)
        for copy in copies:
            if copy.keep is not None:
                self.promises.on_evicted(copy.keep, copy.block.space.slot, self._turn.now)
                copy.keep = None
            self.drop(copy)
        return True


def _plain_slot(copy: Copy) -> int:
    """The size of its slot, or 0 if something is asked for it."""
    return copy.block.space.slot if copy.keep is None else 0
