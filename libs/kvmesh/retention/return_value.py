"""Value of blocks by age: that of the prompts that they are part of, or of a typical prompt."""

from collections.abc import Sequence
from math import exp, inf

from kvmesh.returns.rates import AGE_ENDS, BINS, age_bin
from kvmesh.returns.value import BIN_WIDTHS, LAST, values_by_age

MEMORY = 512  # forecasts that a typical one is the mean of
LEARN_EVERY = 16  # forecasts between two computations of the typical values


class Expectation:
    """The expected return of one prompt: `values` in returns per second by age since `since`.

    `chances` are the probabilities that it returns at all, by age. `over` is set once the prompt
    has returned or its session has ended. `evicted` counts the blocks that were evicted meanwhile.
    """

    __slots__ = ("chances", "evicted", "over", "since", "values")

    def __init__(
        self, since: float, values: tuple[float, ...], chances: tuple[float, ...] = (1.0,) * BINS
    ) -> None:
        self.since = since
        self.values = values
        self.chances = chances
        self.over = False
        self.evicted = 0

    def at(self, now: float) -> tuple[float, float]:
        """The value at `now`, and the time at which it changes next."""
        if self.over:
            return 0.0, inf
        at = age_bin(now - self.since)
        end = self.since + AGE_ENDS[at]
        if end <= now:  # by rounding
            at += 1
            end = self.since + AGE_ENDS[at]
        return self.values[at], end

    def chance(self, now: float) -> float:
        """The probability that the prompt returns after `now`."""
        return 0.0 if self.over else self.chances[age_bin(now - self.since)]


class TypicalReturn:
    """Value of a prompt without a forecast: that of a typical one which is still awaited.

    It never rises with age, so that it orders keys without a forecast as recency does. `values` are
    in returns per second by bin of age.
    """

    def __init__(self) -> None:
        self._learned = 0
        self._awaited = [0.0] * BINS
        self._returns = [0.0] * BINS
        self.values = (0.0,) * BINS

    def learn(self, rates: Sequence[float]) -> None:
        """Add a forecast; those of the past fade."""
        survival, fade = 1.0, 1.0 - 1.0 / MEMORY
        for at in range(BINS):
            self._awaited[at] = fade * self._awaited[at] + survival
            self._returns[at] = fade * self._returns[at] + survival * rates[at]
            survival *= exp(-rates[at] * BIN_WIDTHS[at]) if at < LAST else 0.0
        self._learned += 1
        if self._learned <= LEARN_EVERY or not self._learned % LEARN_EVERY:
            self._compute()

    def value(self, age_s: float) -> float:
        """Returns per second at an age."""
        return self.values[age_bin(age_s)]

    def _compute(self) -> None:
        means = [0.0] * BINS
        for at in range(BINS):
            if self._awaited[at] > 0.0:
                means[at] = self._returns[at] / self._awaited[at]
        values = list(values_by_age(means))
        for at in range(LAST - 1, -1, -1):
            values[at] = max(values[at], values[at + 1])
        self.values = tuple(values)
