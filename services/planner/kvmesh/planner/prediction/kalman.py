"""Kalman filters of a local linear trend.

The model of Dynamo's planner: level and trend with transition [[1, 1], [0, 1]], published with the
variances P = 1000, Q = (1, 0.1) and R = 10. Only the ratios of the variances matter for the
forecast, and the right ones differ from series to series. So several filters with different ratios
run side by side, and the one with the least squared innovations forecasts (Magill, "Optimal
Adaptive Estimation of Sampled Stochastic Processes", 1965). The trend is damped over the horizon
(Gardner and McKenzie, "Forecasting Trends in Time Series", 1985).
"""

import numpy as np

from kvmesh.planner.prediction.calibration import Forecast
from kvmesh.planner.prediction.level_shift import LevelShift

DAMPING = 0.85
# Variances over that of the observations: of the prior, of the level's noise in each filter, and of
# the trend's noise over the level's.
PRIOR = 100.0
LEVEL_NOISES = (0.0005, 0.01, 0.1, 1.0)
TREND_SHARE = 0.1
DECAY = 0.98


class LocalTrend:
    """Forecasts the level plus a damped trend: `kalman`."""

    def __init__(self) -> None:
        self._filters = [_Filter(noise) for noise in LEVEL_NOISES]
        self._shift = LevelShift()
        self._last: float | None = None

    def observe(self, value: float) -> None:
        """Add the value of the next interval."""
        if self._last is None:
            for each in self._filters:
                each.reset(value)
        elif self._shift.observe(value - self._best().expected):
            for each in self._filters:
                each.reset((self._last + value) / 2)
        else:
            for each in self._filters:
                each.update(value)
        self._last = value

    def forecast(self, steps: int) -> Forecast:
        """The level plus the sum of the damped trend over each horizon."""
        best = self._best()
        damped = np.cumsum(DAMPING ** np.arange(1, steps + 1))
        forecast: Forecast = best.level + best.trend * damped
        return forecast

    def _best(self) -> "_Filter":
        return min(self._filters, key=lambda each: each.loss)


class _Filter:
    """One filter; `loss` is the decayed sum of its squared innovations."""

    __slots__ = ("_covariance", "_noise", "level", "loss", "trend")

    def __init__(self, noise: float) -> None:
        self._noise = noise
        self.level = self.trend = self.loss = 0.0
        # Var(level), Cov(level, trend), Var(trend), over the variance of observations.
        self._covariance = (PRIOR, 0.0, PRIOR)

    @property
    def expected(self) -> float:
        return self.level + DAMPING * self.trend

    def reset(self, level: float) -> None:
        """Start again from a level known as well as the mean of two values."""
        self.level, self.trend = level, 0.0
        self._covariance = (0.5, 0.0, TREND_SHARE * self._noise)

    def update(self, value: float) -> None:
        level, both, trend = self._covariance
        level += 2 * DAMPING * both + DAMPING**2 * trend + self._noise
        both = DAMPING * both + DAMPING**2 * trend
        trend = DAMPING**2 * trend + TREND_SHARE * self._noise
        gain, trend_gain = level / (level + 1), both / (level + 1)
        error = value - self.expected
        self.loss = DECAY * self.loss + error * error
        self.level = self.expected + gain * error
        self.trend = DAMPING * self.trend + trend_gain * error
        self._covariance = ((1 - gain) * level, (1 - gain) * both, trend - trend_gain * both)
