"""Restore before return: blocks of expected prompts move up to the arena while the path is idle."""

from bisect import bisect_left

from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, Block, Copy
from kvmesh.kvbm.core.blocks.restored import TRIAL_BLOCKS, RestoreMode
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.returns import NodeReturns

CHECK_S = 0.25
BATCH_BYTES = 256 << 20
MAX_BATCH = 256
MAX_TRIED = 512
RETRY_S = 60.0
MARGIN = 1.5


class Restoring:
    """Starts moves from lower tiers to the arena for the prompts that are worth most there.

    A block is restored if the arena has space, or if the block is worth MARGIN times the copy that
    would be evicted for it. A batch is at most BATCH_BYTES, and the next one starts once no
    move to the arena runs, so that a load waits for one batch at most. While restored blocks are
    mostly lost unread, one batch per RETRY_S shows whether that has changed.
    """

    def __init__(self, store: Store, returns: NodeReturns, enabled: bool) -> None:
        self._store = store
        self._returns = returns
        self._enabled = enabled and returns.by_forecast
        self._next = 0.0

    @property
    def mode(self) -> RestoreMode | None:
        """The state of the measurement; None if nothing is ever restored."""
        lower = DISK in self._store.tiers or self._store.remote is not None
        return self._store.restored.mode if self._enabled and lower else None

    @property
    def due(self) -> bool:
        """True if a check may restore something."""
        return self.mode is not None and self._returns.ordered

    def check(self) -> None:
        """Start a batch if one is due; call often."""
        store = self._store
        if store.now < self._next or not self.due:
            return
        self._next = store.now + CHECK_S
        if any(path.moving for (_, to), path in store.traffic.items() if to == ARENA):
            return
        mode = store.restored.mode
        left = MAX_BATCH if mode == "on" else TRIAL_BLOCKS - store.restored.unread
        if left > 0 and self._start_batch(min(left, MAX_BATCH)) and mode == "off":
            self._next = store.now + RETRY_S

    def _start_batch(self, most: int) -> int:
        """Start to restore at most so many blocks; return their number."""
        started = size = 0
        for digests in self._returns.likeliest(MAX_TRIED):
            index = bisect_left(digests, True, key=self._is_missing)
            while index < len(digests) and started < most and size < BATCH_BYTES:
                block = self._store.blocks.get(digests[index])
                if block is None or not self._restore(block):
                    break
                started, size, index = started + 1, size + block.space.block_bytes, index + 1
            if started == most or size >= BATCH_BYTES:
                break
        return started

    def _is_missing(self, digest: bytes) -> bool:
        block = self._store.blocks.get(digest)
        return block is None or ARENA not in block.copies

    def _restore(self, block: Block) -> bool:
        source = block.registered(DISK) or block.registered(REMOTE)
        if source is None or ARENA in block.copies or block.space.layout.window:
            return False
        target = self._store.reserve(block, ARENA) if self._pays(block, source) else None
        if target is None:
            return False
        target.restored = True
        self._store.restored.start(block.space.block_bytes)
        self._store.move(source, target)
        return True

    def _pays(self, block: Block, source: Copy) -> bool:
        """True if the block is worth more in the arena than what it would displace."""
        arena, now = self._store.tiers[ARENA], self._store.now
        rate = sum(expectation.at(now)[0] for expectation in block.expected)
        value = rate * self._returns.savings.load_s(block.space, source.tier)
        if arena.slots.used + block.space.slot_bytes <= arena.slots.capacity:
            return value > 0.0
        least = arena.least_value(block.space.slot_bytes, now)
        return least is not None and value > MARGIN * least
