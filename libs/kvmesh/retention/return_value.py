"""Value of held blocks by age: the returns per second of holding that a forecast promises.

While the rate of return falls with age, the value is the present rate. A rate that rises later,
as that of a tool which runs for a minute, counts before its time: the value is the greatest number
of expected returns per second of holding over all times until which the blocks could be held. It is
the index by which Gittins orders jobs of unknown length (doi 10.1111/j.2517-6161.1979.tb01068.x).
"""

from collections.abc import Sequence
from math import exp, expm1, inf

from kvmesh.returns.rates import AGE_ENDS, BINS, age_bin

LAST = BINS - 1
WIDTHS = (AGE_ENDS[0], *(AGE_ENDS[k] - AGE_ENDS[k - 1] for k in range(1, BINS)))
MEMORY = 512  # forecasts that a typical one is the mean of
LEARN_EVERY = 16  # forecasts between two computations of the typical values


class Expectation:
    """The expected return of one prompt: `values` in returns per second by age since `since`.

    `over` is set once the prompt has returned or its session has ended. `evicted` counts the
    blocks that were evicted meanwhile.
    """

    __slots__ = ("evicted", "over", "since", "values")

    def __init__(self, since: float, values: tuple[float, ...]) -> None:
        self.since = since
        self.values = values
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
            survival *= exp(-rates[at] * WIDTHS[at]) if at < LAST else 0.0
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


def values_by_age(rates: Sequence[float]) -> tuple[float, ...]:
    """The value in returns per second at the start of each bin, for rates of return per second."""
    values = [0.0] * BINS
    later: list[_Span] = []
    for at in range(LAST, -1, -1):
        rate, width = rates[at], WIDTHS[at]
        if rate > 0.0:
            returns = -expm1(-rate * width)
            span = _Span(rate, returns, returns / rate, 1.0 - returns)
        else:
            span = _Span(0.0, 0.0, width, 1.0)
        while later and later[-1].value > span.value:
            span.add(later.pop())
        values[at] = span.value
        later.append(span)
    return tuple(values)


class _Span:
    """Adjacent bins that are held through: expected returns and seconds, and the share left."""

    __slots__ = ("left", "returns", "seconds", "value")

    def __init__(self, value: float, returns: float, seconds: float, left: float) -> None:
        self.value = value
        self.returns = returns
        self.seconds = seconds
        self.left = left

    def add(self, after: "_Span") -> None:
        """Extend the span by the one after it."""
        self.returns += self.left * after.returns
        self.seconds += self.left * after.seconds
        self.left *= after.left
        self.value = self.returns / self.seconds
