"""Detects that a series has moved to another level."""

import math

# Standard deviations beyond which an error is surprising; two in a row with one sign are a shift.
SURPRISING = 2.2
DECAY = 0.05
# An error counts at most as so many standard deviations, so that one burst hides no shift.
MOST = 4.0
FEWEST = 4


class LevelShift:
    """Watches the one-step errors of a forecast for two surprising ones in a row."""

    def __init__(self) -> None:
        self._variance = 0.0
        self._count = 0
        self._before = 0

    @property
    def deviation(self) -> float:
        """Decayed root of the mean squared error."""
        return math.sqrt(self._variance)

    def observe(self, error: float) -> bool:
        """Add the error of the last interval; True if the level has shifted."""
        sign = self.surprise(error)
        shifted = sign != 0 and sign == self._before
        self._before = 0 if shifted else sign
        squared = error * error
        if self._variance > 0:
            squared = min(squared, MOST * MOST * self._variance)
        self._count += 1
        self._variance += max(DECAY, 1 / self._count) * (squared - self._variance)
        return shifted

    def surprise(self, error: float) -> int:
        """The sign of a surprising error, 0 of another."""
        if self._count < FEWEST or abs(error) <= SURPRISING * self.deviation:
            return 0
        return 1 if error > 0 else -1
