"""The last value, and the mean of the last values."""

from collections import deque

import numpy as np

from kvmesh.planner.prediction.calibration import Forecast
from kvmesh.planner.prediction.level_shift import LevelShift

WINDOW = 16


class LastValue:
    """Forecasts the last value: `constant`."""

    def __init__(self) -> None:
        self._last = 0.0

    def observe(self, value: float) -> None:
        """Add the value of the next interval."""
        self._last = value

    def forecast(self, steps: int) -> Forecast:
        """The last value, `steps` times."""
        return np.full(steps, self._last)


class MovingAverage:
    """Forecasts the mean of the last `WINDOW` values; after a shift, of those since then."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._shift = LevelShift()

    def observe(self, value: float) -> None:
        """Add the value of the next interval."""
        if self._values and self._shift.observe(value - self._mean()):
            last = self._values[-1]
            self._values.clear()
            self._values.append(last)
        self._values.append(value)

    def forecast(self, steps: int) -> Forecast:
        """The mean, `steps` times."""
        return np.full(steps, self._mean())

    def _mean(self) -> float:
        return sum(self._values) / len(self._values)
