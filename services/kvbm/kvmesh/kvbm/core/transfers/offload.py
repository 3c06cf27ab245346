"""Offload of frequently used blocks from the arena to a lower tier."""

from collections import OrderedDict
from collections.abc import Iterable

from kvmesh.kvbm.core.blocks.block import ARENA, Block
from kvmesh.kvbm.core.blocks.savings import Savings
from kvmesh.kvbm.core.blocks.store import Store

MAX_CANDIDATES = 4096


class Offload:
    """Copies blocks used at least `frequency` times to `tier`, at most `max_moves` at a time.

    Blocks whose return is forecast need no earlier use.

    Blocks that `savings` finds not worth the write are left out until their next use, and counted
    as `not_worth`. At most MAX_CANDIDATES wait, each with the request that used it; beyond that the
    oldest is dropped until its next use.
    """

    def __init__(
        self,
        store: Store,
        savings: Savings,
        tier: int,
        frequency: float,
        max_moves: int,
    ) -> None:
        self._store = store
        self._savings = savings
        self._tier = tier
        self._frequency = frequency
        self._max_moves = max_moves
        self._candidates: OrderedDict[Block, str | None] = OrderedDict()
        self._open = True
        self.not_worth = 0
        self._traffic = store.traffic[ARENA, tier]

    def consider(self, blocks: Iterable[Block]) -> None:
        """Add blocks that were registered in the arena or used."""
        if not self._open:
            return
        for block in [block for block in blocks if self._tier not in block.copies]:
            if block not in self._candidates and self._qualifies(block):
                self._candidates[block] = self._store.operation.request
                if len(self._candidates) > MAX_CANDIDATES:
                    self._candidates.popitem(last=False)

    def _qualifies(self, block: Block) -> bool:
        tier = self._store.tiers.get(self._tier)
        if tier is not None and not tier.fits(block.space.slot_bytes):
            return False
        if self._savings.restored_ahead(block):
            return self._savings.pays_below(block, self._tier)
        return block.frequency.at(self._store.now) >= self._frequency

    def start_moves(self) -> None:
        """Start as many moves as may run at a time."""
        while self._open and self._candidates and self._traffic.moving < self._max_moves:
            block, request = self._candidates.popitem(last=False)
            source = block.registered(ARENA)
            if source is None or self._tier in block.copies:
                continue
            if not self._savings.pays_below(block, self._tier):
                self.not_worth += 1
                continue
            target = self._store.reserve(block, self._tier, request)
            if target is not None:
                self._store.move(source, target)

    def close(self) -> None:
        """Stop all further writes to the tier."""
        self._open = False
        self._candidates.clear()
