"""Measured throughput of an engine, for the choice between loading and computing."""

from math import exp

MIN_MEASURED_TOKENS = 32
_MEMORY = 8.0  # large measurements


class Throughput:
    """Units per second of large measurements; 0 until something was measured.

    It is the least-squares fit of the seconds as a multiple of the units, weighted by the units. A
    step takes a constant time beside that of its tokens, so that small steps say little of how long
    a long prefix takes. Older measurements fade by the units measured since.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._squares = 0.0
        self._cubes = 0.0
        self._seconds = 0.0

    def record(self, units: float, seconds: float) -> None:
        """Record that `units` took `seconds`; ignores zeros."""
        if not (units > 0 and seconds > 0):
            return
        large = self._cubes / self._squares if self._squares else units
        kept, square = exp(-units / (_MEMORY * large)), units * units
        self._squares = kept * self._squares + square
        self._cubes = kept * self._cubes + square * units
        self._seconds = kept * self._seconds + square * seconds
        self.value = self._cubes / self._seconds


def combined_throughput(first: float, second: float) -> float:
    """Throughput of two steps in sequence; an unknown first counts as free."""
    if first <= 0 or second <= 0:
        return max(first, second)
    return first * second / (first + second)
