"""Value of held blocks by age: the returns per second of holding that rates of return promise.

While the rate falls with age, the value is the present rate. A rate that rises later counts before
its time: the value is the greatest number of expected returns per second of holding, over all times
until which the blocks could be held. It is the index by which Gittins orders jobs of unknown length
(doi 10.1111/j.2517-6161.1979.tb01068.x).
"""

from collections.abc import Sequence
from math import exp, expm1

from kvmesh.returns.rates import AGE_ENDS, BINS

LAST = BINS - 1
BIN_WIDTHS = (AGE_ENDS[0], *(AGE_ENDS[k] - AGE_ENDS[k - 1] for k in range(1, BINS)))


def values_by_age(rates: Sequence[float]) -> tuple[float, ...]:
    """The value in returns per second at the start of each bin, for rates of return per second."""
    values = [0.0] * BINS
    later: list[_Span] = []
    for at in range(LAST, -1, -1):
        rate, width = rates[at], BIN_WIDTHS[at]
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


def chances_by_age(rates: Sequence[float]) -> tuple[float, ...]:
    """The probability of a return at all after the start of each bin, for rates per second.

    The last bin, which has no end, counts as long as all others together.
    """
    chances = [0.0] * BINS
    left = 1.0
    for at in range(LAST, -1, -1):
        width = BIN_WIDTHS[at] if at < LAST else AGE_ENDS[LAST - 1]
        left *= exp(-rates[at] * width)
        chances[at] = 1.0 - left
    return tuple(chances)


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
