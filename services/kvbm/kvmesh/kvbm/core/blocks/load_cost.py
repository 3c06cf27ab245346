"""Is loading a prefix worth it? Decided by what has been measured."""

from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.2
SAMPLE_S = 0.05
START_S = 0.002
DOUBT_S = 20.0
MOST_DOUBLINGS = 20.0


@dataclass(frozen=True)
class EngineSpeed:
    """What a worker has measured of itself: tokens and bytes a second, 0 where it does not know."""

    compute_tps: float
    load_bps: float


class Traffic:
    """What goes from one tier to another: now, so far, and how fast.

    The first transfer sets the path up and is not measured.
    """

    def __init__(self) -> None:
        self.moving = 0
        self.failed = 0
        self.done = 0
        self.bytes = 0
        self.bps = 0.0
        self._since = 0.0
        self._sample = 0
        self._ended = 0.0
        self._is_set_up = False

    def speed(self, now: float) -> float:
        """Bytes a second, 0 if it is not known.

        A path that was found slow is not used, so nothing more would be learned of it: what was
        measured is believed to be half of the truth for each DOUBT_S that have passed since.
        """
        idle = 0.0 if self.moving else now - self._ended
        return float(self.bps * 2 ** min(MOST_DOUBLINGS, idle / DOUBT_S))

    def begin(self, now: float) -> None:
        """One more block is under way."""
        if not self.moving:
            self._since, self._sample = now, 0
        self.moving += 1

    def end(self, size: int, now: float) -> None:
        """One less; 0 bytes mean that it failed."""
        self.moving -= 1
        self.done += size > 0
        self.failed += size == 0
        self.bytes += size
        self._sample += size
        self._ended = now
        elapsed = now - self._since
        if self._sample and elapsed > 0 and (not self.moving or elapsed > SAMPLE_S):
            if self._is_set_up:
                bps = self._sample / elapsed
                self.bps = self.bps + SMOOTHING * (bps - self.bps) if self.bps else bps
            self._is_set_up = True
            self._since, self._sample = now, 0


@dataclass(frozen=True, slots=True)
class CostStep:
    """Blocks on their way to an engine, all alike: bytes of each, the speed of their tier, bytes
    queued before them, and how many there are.

    A speed of 0 is not known, and not counted until it is.
    """

    size: int
    bps: float
    queued: int
    blocks: int = 1


def worth(steps: Sequence[CostStep], engine: EngineSpeed, block_size: int) -> int:
    """How many leading blocks to load: the number that saves most time, 0 if computing is faster.

    The stages of loading overlap, so that a block costs what its slowest stage does.
    """
    if not engine.compute_tps:
        return sum(step.blocks for step in steps)
    gain, best, count = -START_S, 0.0, 0
    waited = number = 0
    for step in steps:
        gain -= _seconds(max(0, step.queued - waited), step.bps)
        waited = max(waited, step.queued)
        slowest = max(_seconds(step.size, engine.load_bps), _seconds(step.size, step.bps))
        gain += step.blocks * (block_size / engine.compute_tps - slowest)
        number += step.blocks
        if gain > best:
            best, count = gain, number
    return count


def _seconds(size: int, bps: float) -> float:
    return size / bps if bps else 0.0
