"""The last value."""

import numpy as np

from kvmesh.planner.prediction.calibration import Forecast


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
