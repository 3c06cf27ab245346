"""Cost of loading a prefix against computing it, from measured speeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from statistics import median

SMOOTHING = 0.2
FIRST_SAMPLES = 3
SAMPLE_S = 0.05
START_S = 0.002
DOUBT_S = 20.0
BUSY_S = 60.0
MAX_DOUBLINGS = 20.0
TRIAL_S = 0.1
MAX_TRIAL_S = 10.0


@dataclass(frozen=True)
class EngineSpeed:
    """Tokens computed and bytes loaded per second, as a worker measured them; 0 if unknown.

    Loading may have become `doubt` times as fast since. What pays only then is tried for `trial_s`.
    """

    compute_tps: float
    load_bps: float
    doubt: float = 1.0
    trial_s: float = TRIAL_S

    @property
    def hoped(self) -> "EngineSpeed":
        """The speeds if loading is as fast as it may have become."""
        return EngineSpeed(self.compute_tps, self.load_bps * self.doubt)


UNMEASURED = EngineSpeed(0.0, 0.0)


class LoadDoubt:
    """Doubt in the speed at which a worker loads, which it measures only while it loads.

    A worker that was measured as slow loads nothing, so its speed is not measured again. The doubt
    therefore doubles with each DOUBT_S since the last load that took longer than computing its
    blocks. After one that took less the next trial may take twice as long, at most MAX_TRIAL_S: a
    short load changes little of a speed that was measured on long ones.
    """

    def __init__(self) -> None:
        self._since = -inf  # no load has ended yet
        self._trial_s = TRIAL_S

    def speed(self, compute_tps: float, load_bps: float, now: float) -> EngineSpeed:
        """The speeds that a worker reports, with the doubt in them."""
        return EngineSpeed(compute_tps, load_bps, _doubled(now - self._since), self._trial_s)

    def end_load(self, paid: bool, now: float) -> None:
        """Note a load that has ended; it `paid` if it took less time than computing."""
        if paid:
            self._trial_s = min(MAX_TRIAL_S, 2 * self._trial_s)
        else:
            self._since, self._trial_s = now, TRIAL_S


class Traffic:
    """Moves from one tier to another: running, ended, and their measured speed.

    The first transfer sets the path up and is not measured. Nor are transfers that end around a
    failure: the time is the failure's. `bps` is 0 until there are FIRST_SAMPLES, and then starts
    with their median: a busy processor can make any one of them a hundred times too slow, and a
    path that seems slow is not measured again for long.
    """

    def __init__(self) -> None:
        self.moving = 0
        self.failed = 0
        self.done = 0
        self.bytes = 0
        self.bps = 0.0
        self._first_samples: list[float] = []
        self._since = 0.0
        self._sample = 0
        self._ended = 0.0
        self._is_set_up = False
        self._busy = 0.0
        self._changed = 0.0

    def busy_share(self, now: float) -> float:
        """The share of time in which moves ran, of about the last BUSY_S."""
        left = exp((self._changed - now) / BUSY_S)
        return left * self._busy + (1.0 - left) * (self.moving > 0)

    def _change(self, now: float) -> None:
        self._busy, self._changed = self.busy_share(now), now

    def speed(self, now: float) -> float:
        """Estimated bytes per second, 0 if unknown.

        A path that was measured as slow is not used, so its speed is not measured again. The
        estimate therefore doubles with each DOUBT_S of idle time, until the path is tried again.
        """
        idle = 0.0 if self.moving else now - self._ended
        return self.bps * _doubled(idle)

    def begin(self, now: float) -> None:
        """Count a block whose move starts."""
        if not self.moving:
            self._since, self._sample = now, 0
            self._change(now)
        self.moving += 1

    def end(self, size: int, now: float) -> None:
        """Count a block whose move ended; `size` 0 means failure."""
        if self.moving == 1:
            self._change(now)
        self.moving -= 1
        self.done += size > 0
        self.failed += size == 0
        self.bytes += size
        self._sample += size
        self._ended = now
        if not size:
            self._since, self._sample, self._is_set_up = now, 0, False
            return
        elapsed = now - self._since
        if elapsed > 0 and (not self.moving or elapsed > SAMPLE_S):
            if self._is_set_up:
                self._measure(self._sample / elapsed)
            self._is_set_up = True
            self._since, self._sample = now, 0

    def _measure(self, bps: float) -> None:
        if self.bps:
            self.bps += SMOOTHING * (bps - self.bps)
            return
        self._first_samples.append(bps)
        if len(self._first_samples) == FIRST_SAMPLES:
            self.bps = median(self._first_samples)


@dataclass(frozen=True, slots=True)
class CostStep:
    """Consecutive blocks of one tier: bytes of each, bytes per second of the tier, bytes queued
    before them, and their number.

    A speed of 0 is unknown and costs nothing.
    """

    size: int
    bps: float
    queued: int
    blocks: int = 1


def blocks_worth_loading(steps: Sequence[CostStep], engine: EngineSpeed, block_size: int) -> int:
    """Number of leading blocks whose loading saves most time; 0 if computing is faster.

    The stages of loading overlap, so a block costs as much as its slowest stage. Blocks that pay
    only if the engine has become faster count up to the length of a trial, at least one.
    """
    proven = _most_gain(steps, engine, block_size)
    if engine.doubt <= 1 or not (engine.compute_tps and engine.load_bps):
        return proven
    hoped = _most_gain(steps, engine.hoped, block_size)
    if hoped <= proven:
        return proven
    trial = max(1.0, engine.trial_s * engine.load_bps / steps[0].size)
    return max(proven, int(min(hoped, trial)))


def _most_gain(steps: Sequence[CostStep], engine: EngineSpeed, block_size: int) -> int:
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


def _doubled(idle_s: float) -> float:
    """The factor by which a speed may have grown that was not measured for so long."""
    return float(2 ** min(MAX_DOUBLINGS, max(0.0, idle_s) / DOUBT_S))


def _seconds(size: int, bps: float) -> float:
    return size / bps if bps else 0.0
