"""What is known to be in a store that all nodes share."""

from collections import OrderedDict
from collections.abc import Callable

from kvmesh.kvbm.core.blocks.block import REMOTE, Block, Copy, CopyState
from kvmesh.kvbm.core.blocks.tier import EvictionTurn

LEASE_SHARE = 0.8


class RemoteTier:
    """At most `most` copies in a store that drops them `lease_s` after they were last heard of.

    The store bounds itself and decides what leaves it: here a copy is only known or forgotten.
    """

    def __init__(
        self, most: int, lease_s: float, turn: EvictionTurn, on_drop: Callable[[Copy], None]
    ) -> None:
        self.most = most
        self._lease_s = LEASE_SHARE * lease_s
        self._turn = turn
        self._on_drop = on_drop
        self._heard: OrderedDict[Copy, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heard)

    def reserve(self, block: Block) -> Copy:
        """A staged copy, used once."""
        while len(self._heard) >= self.most:
            self.drop(next(iter(self._heard)))
        copy = block.copies[REMOTE] = Copy(block, REMOTE, 0, users=1)
        self._heard[copy] = self._turn.now
        return copy

    def heard(self, copy: Copy) -> None:
        """It is there now: its lease begins anew."""
        if copy in self._heard:
            self._heard[copy] = self._turn.now
            self._heard.move_to_end(copy)

    def hold(self, *copies: Copy) -> None:
        for copy in copies:
            copy.users += 1

    def release(self, *copies: Copy) -> None:
        for copy in copies:
            copy.users -= 1

    def drop(self, copy: Copy) -> None:
        """Forget it."""
        if copy.state is not CopyState.DROPPED:
            self._on_drop(copy)
            copy.state = CopyState.DROPPED
            del self._heard[copy]

    def expire(self) -> None:
        """Forget what the store may have dropped."""
        while self._heard:
            copy, heard = next(iter(self._heard.items()))
            if self._turn.now - heard <= self._lease_s:
                return
            self.drop(copy)
