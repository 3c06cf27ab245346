"""Writes over links so slow that hardly any block would be loaded over them again."""

from kvmesh.kvbm.core.blocks.block import Space
from kvmesh.kvbm.core.blocks.load_cost import EngineSpeed

MOST_RATIO = 2.0  # of the time to move a block to that of computing it, where loads are waited for
TRIAL_BLOCKS = 8
REST = 20.0  # times the duration of a trial
LONG_S = 0.1  # what took less may have been slowed by messages and steps, not by the link
SHORTEST_S = 1e-6


def is_slow(space: Space, engine: EngineSpeed, bps: float, ratio: float) -> bool:
    """True if moving a block at `bps` takes `ratio` times as long as computing it, or longer."""
    moved, computed = space.block_bytes * engine.compute_tps, bps * space.layout.block_size
    return bps > 0 and moved >= ratio * computed


class WritePace:
    """The speed of a worker's writes, and the blocks that it may write where that is slow.

    An engine cannot evict what it writes: over a slow link that is a large part of its memory,
    for blocks that are sooner computed than loaded. A few blocks from time to time show if the link
    has become faster. `bps` is the speed of the latest long or faster write; 0 if unknown.
    """

    def __init__(self) -> None:
        self.bps = 0.0
        self._rests_until = 0.0

    def end_write(self, size: int, since: float, now: float) -> None:
        """Note that a worker has written `size` bytes since it was given their places."""
        seconds = now - since
        if size <= 0:
            return
        self._rests_until = now + REST * seconds
        if seconds >= LONG_S or size > self.bps * seconds > 0:
            self.bps = size / max(seconds, SHORTEST_S)

    def most_blocks(
        self, space: Space, engine: EngineSpeed, ratio: float, now: float
    ) -> int | None:
        """The most blocks to write now; None unless writing is slow by `ratio`."""
        if not is_slow(space, engine, self.bps, ratio):
            return None
        return TRIAL_BLOCKS if now >= self._rests_until else 0
