"""Seconds of GPU that a copy of a block saves at each return of its prompt."""

from kvmesh.kvbm.core.blocks.block import ARENA, Block, Space
from kvmesh.kvbm.core.blocks.load_cost import EngineSpeed
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.retention.awaited_prompts import chance_of_return

UNKNOWN_TPS = 10_000.0
UNKNOWN_SHARE = 0.5  # of computing a block: what loading it over a path of unknown speed takes


class Savings:
    """Compares computing a block with loading it, by the speeds of engines and paths so far.

    The load of an expected block that the node restores before its return costs no request time.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._compute_tps: dict[Space, float] = {}

    def record(self, space: Space, engine: EngineSpeed) -> None:
        """Note how fast an engine of a space computes."""
        if engine.compute_tps > 0:
            self._compute_tps[space] = engine.compute_tps

    def compute_s(self, space: Space) -> float:
        """Seconds to compute a block."""
        return space.layout.block_size / self._compute_tps.get(space, UNKNOWN_TPS)

    def load_s(self, space: Space, tier: int) -> float:
        """Seconds to load a block from a lower tier to the arena, at most those to compute it."""
        compute_s, traffic = self.compute_s(space), self._store.traffic
        bps = traffic[tier, ARENA].bps or traffic[ARENA, tier].bps
        return min(compute_s, space.block_bytes / bps) if bps else UNKNOWN_SHARE * compute_s

    def restored_ahead(self, block: Block) -> bool:
        """True if the block may be loaded ahead of the return that is expected of it."""
        return bool(block.expected) and self._store.restored.of(block.tenant).ahead

    def pays_below(self, block: Block, tier: int) -> bool:
        """True if a copy in a lower tier is expected to save more than writing it costs.

        It saves the time by which loading is faster than computing, if the prompt returns. The
        write delays loads from the tier by its own time, as often as such loads run. While the
        speed of the engines is unknown, any chance of a return is enough.
        """
        space, traffic, now = block.space, self._store.traffic, self._store.now
        chance = chance_of_return(block.expected, now)
        if space not in self._compute_tps:
            return chance > 0.0
        saved = self.compute_s(space)
        if not self.restored_ahead(block):
            saved -= self.load_s(space, tier)
        bps = traffic[ARENA, tier].bps
        write_s = space.block_bytes / bps if bps else 0.0
        delay_s = write_s * traffic[tier, ARENA].busy_share(now)
        return chance * saved > delay_s

    def in_arena_s(self, block: Block) -> float:
        """Seconds that a copy in the arena saves a return: its load from below or computation."""
        below = [tier for tier in block.copies if block.registered(tier) and tier != ARENA]
        return min(
            (self.load_s(block.space, tier) for tier in below),
            default=self.compute_s(block.space),
        )
