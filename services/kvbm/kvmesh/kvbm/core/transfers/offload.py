"""What is written through from the arena to a lower tier, and when."""

from collections import OrderedDict
from collections.abc import Iterable

from kvmesh.kvbm.core.blocks.block import ARENA, Block
from kvmesh.kvbm.core.blocks.store import Store

WAITING = 4096


class Offload:
    """Blocks asked for at least `frequency` times go to `tier`, at most `at_once` at a time.

    What waits is bounded: the oldest candidate gives way and comes again when it is hit again.
    """

    def __init__(
        self, store: Store, tier: int, frequency: float, decay_s: float, at_once: int
    ) -> None:
        self._store = store
        self._tier = tier
        self._frequency = frequency
        self._decay_s = decay_s
        self._at_once = at_once
        self._waiting: OrderedDict[Block, None] = OrderedDict()
        self.open = True

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def consider(self, blocks: Iterable[Block]) -> None:
        """Blocks have come to the arena, or were asked for."""
        if not self.open:
            return
        for block in [block for block in blocks if self._tier not in block.copies]:
            if block not in self._waiting and self._is_wanted(block):
                self._waiting[block] = None
                if len(self._waiting) > WAITING:
                    self._waiting.popitem(last=False)

    def _is_wanted(self, block: Block) -> bool:
        tier = self._store.tiers.get(self._tier)
        if tier is not None and not tier.fits(block.space.slot):
            return False
        return block.uses.now(self._store.now, self._decay_s) >= self._frequency

    def pump(self) -> None:
        """Begin as many moves as may run."""
        traffic = self._store.traffic[ARENA, self._tier]
        while self.open and self._waiting and traffic.moving < self._at_once:
            block, _ = self._waiting.popitem(last=False)
            source = block.ready(ARENA)
            if source is None or self._tier in block.copies:
                continue
            target = self._store.reserve(block, self._tier)
            if target is not None:
                self._store.move(source, target)

    def close(self) -> None:
        """The tier takes no more."""
        self.open = False
        self._waiting.clear()
