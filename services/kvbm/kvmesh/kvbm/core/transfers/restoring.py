"""Restore before return: blocks of expected prompts move up to the arena while the path is idle."""

from bisect import bisect_left

from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, Block, Copy
from kvmesh.kvbm.core.blocks.restored import LEAST_READ, RestoredUse, RestoreMode
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.returns import NodeReturns

CHECK_S = 0.25
BATCH_BYTES = 256 << 20
MAX_BATCH = 256
MAX_TRIED = 512
MARGIN = 1.5


class Restoring:
    """Starts moves from lower tiers to the arena for the prompts that are worth most there.

    A block is restored if the arena has space, or if it is likely to be read while it stays in the
    arena, and worth MARGIN times the copy that would be evicted for it. A batch is at most
    BATCH_BYTES, and the next one starts once no move to the arena runs, so that a load waits for
    one batch at most. What comes of a tenant's restored blocks decides for that tenant whether more
    are.
    """

    def __init__(self, store: Store, returns: NodeReturns) -> None:
        self._store = store
        self._returns = returns
        self._next = 0.0

    @property
    def mode(self) -> RestoreMode | None:
        """The state of the measurement; None if nothing is ever restored."""
        return self._store.restored.mode if self._returns.enabled else None

    @property
    def due(self) -> bool:
        """True if a check may restore something."""
        return self._returns.has_forecasts

    def check(self) -> None:
        """Start a batch if one is due; call often."""
        store = self._store
        if store.now < self._next or not self.due:
            return
        self._next = store.now + CHECK_S
        if any(path.moving for (_, to), path in store.traffic.items() if to == ARENA):
            return
        self._start_batch()

    def _start_batch(self) -> None:
        started = size = 0
        now, restored = self._store.now, self._store.restored
        left: dict[RestoredUse, float] = {}
        off: set[RestoredUse] = set()
        for digests in self._returns.likeliest(MAX_TRIED, self._allows):
            index = bisect_left(digests, True, key=self._is_missing)
            while index < len(digests) and started < MAX_BATCH and size < BATCH_BYTES:
                block = self._store.blocks.get(digests[index])
                if block is None:
                    break
                use = restored.of(block.tenant)
                if use not in left:
                    left[use] = use.allowance(now)
                is_off = use.mode == "off"
                if left[use] <= 0.0 or not self._restore(block):
                    break
                left[use] -= 1.0
                if is_off:
                    off.add(use)
                started, size, index = started + 1, size + block.space.block_bytes, index + 1
            if started == MAX_BATCH or size >= BATCH_BYTES:
                break
        for use in off:
            use.wait(now)

    def _allows(self, tenant: str) -> bool:
        return self._store.restored.of(tenant).allowance(self._store.now) > 0.0

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
        self._store.restored.start(block.tenant, block.space.block_bytes)
        self._store.move(source, target)
        return True

    def _pays(self, block: Block, source: Copy) -> bool:
        """True if the block is worth more in the arena than what it would displace."""
        arena, savings = self._store.tiers[ARENA], self._returns.savings
        value = self._rate(block) * savings.load_s(block.space, source.tier)
        if arena.slots.used + block.space.slot_bytes <= arena.slots.capacity:
            return value > 0.0
        displaced = arena.displaced(block.space.slot_bytes)
        if displaced is None:
            return False
        last = displaced.block
        stays_s = self._store.now - last.used  # recency evicts a block after about as long
        if self._rate(block) * stays_s < LEAST_READ:
            return False
        return value > MARGIN * self._rate(last) * savings.in_arena_s(last)

    def _rate(self, block: Block) -> float:
        """The returns per second that holding a block promises."""
        return sum(expectation.value(self._store.now) for expectation in block.expected)
