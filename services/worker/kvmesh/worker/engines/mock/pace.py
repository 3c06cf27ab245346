"""Speed of a simulated engine over time: slower kinds of work, noisy neighbours and heat."""

import math
from dataclasses import dataclass
from random import Random

WARM = 0.5  # of the greatest heat; below it an engine is not slowed


@dataclass(frozen=True)
class PaceOptions:
    """Factors by which steps take longer than the performance model says, named as in `[mock]`.

    - `slow_prefill` and `slow_decode` apply to that work at all times.
    - A noisy neighbour multiplies both by `noise` in spells of `noise_s` seconds on average, with
      calm ones of `calm_s` between them. Both are exponential.
    - Heat follows the share of time in steps with the time constant `heat_s`. From WARM on it slows
      both in proportion, up to `heat` for an engine that is always busy.
    """

    slow_prefill: float = 1.0
    slow_decode: float = 1.0
    noise: float = 1.0
    noise_s: float = 30.0
    calm_s: float = 60.0
    heat: float = 1.0
    heat_s: float = 60.0


class Pace:
    """The factors of one engine; `seed` determines its neighbour's spells."""

    def __init__(self, options: PaceOptions, seed: str) -> None:
        self.options = options
        self._rng = Random(seed)
        self._noisy = True
        self._spell_end: float | None = None
        self._warmth = 0.0
        self._checked = 0.0
        self._busy_s = 0.0

    def factors(self, now: float, busy_s: float) -> tuple[float, float]:
        """Factors of prefill and decode at `now`, after `busy_s` seconds in steps since the start.

        To be called in the order of time.
        """
        options = self.options
        slow = self._noise(now) if options.noise != 1.0 else 1.0
        if options.heat != 1.0:
            slow *= self._heat(now, busy_s)
        return options.slow_prefill * slow, options.slow_decode * slow

    def _noise(self, now: float) -> float:
        options = self.options
        if self._spell_end is None:
            self._noisy = self._rng.random() * (options.noise_s + options.calm_s) < options.noise_s
            self._spell_end = now + self._spell()
        while now >= self._spell_end:
            self._noisy = not self._noisy
            self._spell_end += self._spell()
        return options.noise if self._noisy else 1.0

    def _spell(self) -> float:
        mean = self.options.noise_s if self._noisy else self.options.calm_s
        return max(self._rng.expovariate(1 / mean), 1e-3)

    def _heat(self, now: float, busy_s: float) -> float:
        elapsed = now - self._checked
        if elapsed > 0:
            share = min((busy_s - self._busy_s) / elapsed, 1.0)
            self._warmth += (share - self._warmth) * -math.expm1(-elapsed / self.options.heat_s)
            self._checked, self._busy_s = now, busy_s
        return 1.0 + (self.options.heat - 1.0) * max(self._warmth - WARM, 0.0) / (1.0 - WARM)
