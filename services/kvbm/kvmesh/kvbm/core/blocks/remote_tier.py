"""Index of the blocks in the store that all nodes share."""

from collections import OrderedDict
from collections.abc import Callable

from kvmesh.bus.messages import EVICTED, EXPIRED
from kvmesh.kvbm.core.blocks.block import EVICTION, REMOTE, Block, Copy, CopyState, DropCause
from kvmesh.kvbm.core.blocks.tier import Operation

LEASE_SHARE = 0.8


class RemoteTier:
    """At most `max_blocks` copies in a store that drops them `lease_s` after they were last seen.

    The store limits its size and evicts by its own policy; this index only adds and drops copies.
    """

    def __init__(
        self,
        max_blocks: int,
        lease_s: float,
        operation: Operation,
        on_drop: Callable[[Copy, DropCause], None],
    ) -> None:
        self.max_blocks = max_blocks
        self._lease_s = LEASE_SHARE * lease_s
        self._operation = operation
        self._on_drop = on_drop
        self._seen: OrderedDict[Copy, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def reserve(self, block: Block, request: str | None) -> Copy:
        """A staged copy with one user, for a request."""
        while len(self._seen) >= self.max_blocks:
            self.drop(next(iter(self._seen)), DropCause(EVICTED, request))
        copy = block.copies[REMOTE] = Copy(block, REMOTE, 0, users=1)
        self._seen[copy] = self._operation.now
        return copy

    def renew(self, copy: Copy) -> None:
        """Restart the lease of a copy that was just found in the store."""
        if copy in self._seen:
            self._seen[copy] = self._operation.now
            self._seen.move_to_end(copy)

    def hold(self, *copies: Copy) -> None:
        for copy in copies:
            copy.users += 1

    def release(self, *copies: Copy) -> None:
        for copy in copies:
            copy.users -= 1

    def drop(self, copy: Copy, cause: DropCause = EVICTION) -> None:
        if copy.state is not CopyState.DROPPED:
            self._on_drop(copy, cause)
            copy.state = CopyState.DROPPED
            del self._seen[copy]

    def expire(self) -> None:
        """Drop copies that may have expired in the store."""
        while self._seen:
            copy, seen = next(iter(self._seen.items()))
            if self._operation.now - seen <= self._lease_s:
                return
            self.drop(copy, DropCause(EXPIRED))
