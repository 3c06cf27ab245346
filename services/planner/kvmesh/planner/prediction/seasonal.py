"""Repeats the last periods of a series; finds the period by itself.

The forecast is the seasonal naive one (Hyndman and Athanasopoulos, "Forecasting: Principles and
Practice", 2021, section 5.2) with these additions. The last periods are averaged, and smoothed if
that fits better. A lag near the period applies that fits the last intervals best, so a period may
drift. The season is scaled to the present level, and mixed with the forecast of a local trend by
the strength of the season. Before two periods were seen, and where the season does not explain the
last two intervals, the local trend forecasts alone.
"""

import numpy as np

from kvmesh.planner.prediction.calibration import Forecast
from kvmesh.planner.prediction.kalman import LocalTrend
from kvmesh.planner.prediction.level_shift import LevelShift
from kvmesh.planner.prediction.periods import Period, find_period

DAY_S = 86_400.0
# The history covers so many days, within these numbers of values.
DAYS = 2.5
VALUES = (4096, 65_536)
# Values from one search of the period to the next: this many, or a share of the history.
SEARCH_EVERY = 16
SEARCH_SHARE = 1 / 16
PERIODS = 3
# The lag is fitted to at most so many last values, within a share of the period.
FITTED = 256
DRIFT = 1 / 16
MOST_DRIFT = 6
# The level is compared over this share of a period, within these numbers of values.
LEVEL_SHARE = 1 / 4
LEVEL_VALUES = (3, 48)
MOST_SCALE = 4.0
# Spans, as shares of the period, over which the season may be smoothed; checked on at most so many
# of the last values.
SPANS = (0.0, 1 / 64, 1 / 24)
CHECKED = 1024


class Seasonal:
    """Forecasts the mean of the last periods, scaled to the present level: `seasonal`."""

    def __init__(self, interval_s: float) -> None:
        self._trend = LocalTrend()
        self._most = int(min(max(VALUES[0], DAYS * DAY_S / interval_s), VALUES[1]))
        self._buffer = np.zeros(2 * self._most)
        self._end = 0
        self._since_search = 0
        self._shift = LevelShift()
        # The next period, from the next value on; None without a period.
        self._season: Forecast | None = None
        self._surprises = [0, 0]
        self._span = 1
        self.period: Period | None = None

    def observe(self, value: float) -> None:
        """Add the value of the next interval."""
        if self._end == len(self._buffer):
            self._buffer[: self._most] = self._buffer[self._most :]
            self._end = self._most
        self._buffer[self._end] = value
        self._end += 1
        self._trend.observe(value)
        if self._season is not None:
            error = value - float(self._season[0])
            self._surprises = [self._surprises[1], self._shift.surprise(error)]
            self._shift.observe(error)
        self._since_search += 1
        if self._since_search >= max(SEARCH_EVERY, len(self._history) * SEARCH_SHARE):
            self._since_search = 0
            self.period = find_period(self._history)
            if self.period is not None:
                self._span = _best_span(self._history, self.period.length)
        self._season = self._next_period()

    def forecast(self, steps: int) -> Forecast:
        """The season mixed with the local trend by the season's strength."""
        trend = self._trend.forecast(steps)
        if self._season is None or self.period is None or abs(sum(self._surprises)) == 2:
            return trend
        periods = self._periods(self.period.length)
        # The share of a mean of equally correlated values (Spearman and Brown).
        strength = self.period.strength
        share = periods * strength / (1 + (periods - 1) * strength)
        mixed: Forecast = trend + share * (np.resize(self._season, steps) - trend)
        return mixed

    @property
    def _history(self) -> Forecast:
        return self._buffer[max(0, self._end - self._most) : self._end]

    def _periods(self, length: int) -> int:
        return min(PERIODS, len(self._history) // length - 1)

    def _next_period(self) -> Forecast | None:
        """The last periods' mean, scaled to the present level; None before two were seen."""
        if self.period is None or self._periods(self.period.length) < 1:
            return None
        history, length = self._history, self.period.length
        offset, error = self._offset(history, length)
        profile = self._profile(history, length, offset)
        last = min(max(int(length * LEVEL_SHARE), LEVEL_VALUES[0]), LEVEL_VALUES[1])
        tail = profile[length - last :]
        scale = (float(history[-last:].sum()) + error) / (float(tail.sum()) + error + 1e-12)
        return profile * min(max(scale, 1 / MOST_SCALE), MOST_SCALE)

    def _offset(self, history: Forecast, length: int) -> tuple[int, float]:
        """The change of the lag that fits the last values best, and its error over them.

        The error is the root of the sum of squares: about the noise of a sum of them.
        """
        fitted = min(FITTED, length)
        reach = min(MOST_DRIFT, int(length * DRIFT))
        first = len(history) - fitted - length
        reach = min(reach, first)
        recent = history[-fitted:]
        window = history[first - reach : first + reach + fitted]
        lagged = np.lib.stride_tricks.sliding_window_view(window, fitted)
        squared = ((lagged - recent) ** 2).sum(axis=1)
        # An offset must fit clearly better than none.
        squared[reach] *= 0.9
        # Row 0 starts `reach` values earlier: its lag is longer.
        best = int(squared.argmin())
        return reach - best, float(squared[best]) ** 0.5

    def _profile(self, history: Forecast, length: int, offset: int) -> Forecast:
        """The mean of the last periods, from the phase of the next value on."""
        periods = self._periods(length)
        weights = 0.5 ** np.arange(periods)
        profile = np.zeros(length)
        for back in range(periods):
            start = len(history) - (back + 1) * length - offset
            indices = np.arange(start, start + length)
            # With an earlier phase the period reaches past the last value: it repeats.
            indices = np.where(indices >= len(history), indices - length, indices)
            profile += weights[back] * history[np.maximum(indices, 0)]
        return _smoothed(profile / weights.sum(), self._span)


def _smoothed(profile: Forecast, span: int) -> Forecast:
    """The mean over `span` values around each, an odd number; the profile is periodic."""
    if span == 1:
        return profile
    around = np.concatenate([profile[-(span // 2) :], profile, profile[: span // 2]])
    smoothed: Forecast = np.convolve(around, np.full(span, 1 / span), mode="valid")
    return smoothed


def _best_span(history: Forecast, length: int) -> int:
    """The span with which the period before the last one fits the last one best."""
    last, before = history[-length:], history[-2 * length : -length]
    spans = sorted({2 * int(share * length / 2) + 1 for share in SPANS})
    errors = [float(((_smoothed(before, span) - last)[-CHECKED:] ** 2).sum()) for span in spans]
    return spans[errors.index(min(errors))]
