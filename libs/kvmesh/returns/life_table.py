"""Life table of one class of prompts: returns and seconds at risk, by age since the last use.

The rate of return at an age is the number of returns at that age over the seconds that prompts have
waited at that age. Prompts that still wait count with their seconds so far, so that rates are not
biased towards early returns. Old evidence fades with a half-life.
"""

from collections.abc import Sequence

from kvmesh.returns.rates import AGE_ENDS, BINS, age_bin
from kvmesh.returns.value import BIN_WIDTHS, LAST

HALF_LIFE_S = 6 * 3600.0
PRIOR_PROMPTS = 20.0  # that pass a bin: evidence of the belief that the rate halves from bin to bin
COARSE_RETURNS = 2.0  # evidence that a coarser class gives a finer one


class LifeTable:
    """Evidence of one class. Times are in seconds and do not decrease by much.

    `prompts`, `returned` and `expected` count, faded, the prompts that have ended, those that
    returned, and the returns that were expected of them.
    """

    __slots__ = (
        *("_at", "_returns", "_seconds", "_waiting"),
        *("closed", "expected", "prompts", "returned"),
    )

    def __init__(self, now: float) -> None:
        self.closed = False
        self._returns = [0.0] * BINS
        self._seconds = [0.0] * BINS
        self._waiting = [0] * BINS
        self._at = [now] * BINS
        self.prompts = 0.0
        self.returned = 0.0
        self.expected = 0.0

    def close(self) -> None:
        """Drop the evidence: prompts that wait may hold a forgotten class for long."""
        self.closed = True
        self._returns, self._seconds, self._waiting, self._at = [], [], [], []

    def enter(self, bin_: int, now: float) -> None:
        """A prompt reaches a bin of age; of no effect once closed."""
        if self.closed:
            return
        self._pass_time(bin_, now)
        self._waiting[bin_] += 1

    def leave(self, bin_: int, now: float) -> None:
        """A prompt leaves a bin of age: it grows older, returns or is forgotten.

        Of no effect once closed.
        """
        if self.closed:
            return
        self._pass_time(bin_, now)
        self._waiting[bin_] -= 1

    def count_return(self, age_s: float, until_s: float) -> None:
        """A prompt that has left its bin at the age `until_s` had returned at `age_s`.

        Its seconds after that were counted and are taken back. Of no effect once closed.
        """
        if self.closed:
            return
        first, last = age_bin(age_s), age_bin(until_s)
        for bin_ in range(first, last + 1):
            start = max(age_s, AGE_ENDS[bin_ - 1] if bin_ else 0.0)
            late_s = max(min(until_s, AGE_ENDS[bin_]) - start, 0.0)
            self._seconds[bin_] = max(self._seconds[bin_] - late_s, 0.0)
        self._returns[first] += 1.0
        self.returned += 1.0

    def own_rates(self, now: float) -> list[float]:
        """Rates per second from this evidence and the belief that rates halve from bin to bin."""
        rates, belief = [], 1.0 / AGE_ENDS[0]
        for bin_ in range(BINS):
            self._pass_time(bin_, now)
            prior_s = PRIOR_PROMPTS * min(BIN_WIDTHS[bin_], AGE_ENDS[LAST - 1])
            returns = self._returns[bin_] + belief * prior_s
            belief = returns / (self._seconds[bin_] + prior_s)
            rates.append(belief)
            belief /= 2
        return rates

    def refine(self, coarse: Sequence[float], now: float) -> list[float]:
        """Rates per second from this evidence and the rates of a coarser class."""
        rates = []
        for bin_, rate in enumerate(coarse):
            self._pass_time(bin_, now)
            returns = self._returns[bin_] + COARSE_RETURNS
            rates.append(returns / (self._seconds[bin_] + COARSE_RETURNS / rate))
        return rates

    def count(self, prompts: float, expected: float) -> None:
        """Count prompts that have ended, and the returns expected of them."""
        self.prompts += prompts
        self.expected += expected

    def _pass_time(self, bin_: int, now: float) -> None:
        passed = now - self._at[bin_]
        if passed <= 0:
            return
        self._at[bin_] = now
        kept: float = 0.5 ** (passed / HALF_LIFE_S)
        self._returns[bin_] *= kept
        self._seconds[bin_] = self._seconds[bin_] * kept + self._waiting[bin_] * passed
        if bin_ == 0:
            self.prompts *= kept
            self.returned *= kept
            self.expected *= kept
