"""Prediction intervals of a point forecast, from its own past errors at each horizon.

The residuals of bursty counts grow with their level (Taylor's power law: the variance is a power of
the mean). A residual is therefore divided by a power of the forecast before it is kept, and the
exponent with the least pinball loss so far applies, at each horizon separately. Quantiles are those
of split conformal prediction: order statistics of the last residuals.
"""

import math
from statistics import NormalDist
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Forecast: TypeAlias = NDArray[np.float64]

# Residuals are kept at these horizons; a horizon between two of them has those of the longer one.
HORIZONS = (1, 2, 3, 4, 6, 9, 13, 20, 30, 45, 64, 96)
# Exponents of the forecast by which a residual is divided: constant, Poisson, proportional.
EXPONENTS = np.array([0.0, 0.5, 1.0])
WINDOW = 128
# With fewer residuals, those of a shorter horizon apply, or the quantiles of Poisson counts.
ENOUGH = 8
SCORED = 0.9
LOSS_DECAY = 0.98
# A forecast below this share of the mean counts as this share: a residual stays finite at zero.
FLOOR = 0.1
MEAN_DECAY = 1 / 64

_HORIZONS = np.array(HORIZONS)
_NEAREST = np.searchsorted(_HORIZONS, np.arange(1, HORIZONS[-1] + 1))


class PointModel(Protocol):
    """Forecasts the expected values of a series."""

    def observe(self, value: float) -> None:
        """Add the value of the next interval, finite and at least 0."""
        ...

    def forecast(self, steps: int) -> Forecast:
        """Expected values of the next `steps` intervals; called after the first observation."""
        ...


class CalibratedPredictor:
    """A `Predictor` of a point model's forecasts, with quantiles of its past errors."""

    def __init__(self, model: PointModel) -> None:
        self._model = model
        self._mean = 0.0
        self._count = 0
        self._latest: Forecast = np.zeros(0)
        # The last forecasts, a ring with a row per interval and a column per horizon.
        self._past = np.zeros((HORIZONS[-1], len(HORIZONS)))
        self._errors = _Errors()
        self._cached: dict[float, tuple[Forecast, Forecast]] = {}

    def observe(self, value: float) -> None:
        """Add the value of the next interval; raises ValueError unless it is finite and >= 0."""
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"a value of a series must be finite and at least 0, not {value}")
        self._mean += max(MEAN_DECAY, 1 / (self._count + 1)) * (value - self._mean)
        # Of the horizons, those for which a forecast was made.
        due = int(np.searchsorted(_HORIZONS, self._count, side="right"))
        if due:
            rows = (self._count - _HORIZONS[:due]) % HORIZONS[-1]
            self._errors.add(value, self._past[rows, np.arange(due)], self._floor())
        self._model.observe(value)
        self._latest = np.maximum(self._model.forecast(HORIZONS[-1]), 0.0)
        self._past[self._count % HORIZONS[-1]] = self._latest[_HORIZONS - 1]
        self._count += 1
        self._cached.clear()

    def predict(self, steps: int, quantile: float = 0.5) -> list[float]:
        """Quantiles of the next `steps` values; raises ValueError unless 0 < quantile < 1."""
        if not 0 < quantile < 1:
            raise ValueError(f"a quantile must be between 0 and 1, not {quantile}")
        if not self._count:
            return [0.0] * steps
        forecast, nearest = self._latest, _NEAREST
        if steps > len(forecast):
            forecast = np.maximum(self._model.forecast(steps), 0.0)
            nearest = np.pad(nearest, (0, steps - len(nearest)), mode="edge")
        forecast, nearest = forecast[:steps], nearest[:steps]
        if quantile not in self._cached:
            self._cached[quantile] = self._errors.quantiles(quantile)
        residuals, exponents = self._cached[quantile]
        scale = np.maximum(forecast, self._floor()) ** exponents[nearest]
        predicted: list[float] = np.maximum(forecast + residuals[nearest] * scale, 0.0).tolist()
        return predicted

    def _floor(self) -> float:
        return max(FLOOR * self._mean, 1e-9)


class _Errors:
    """The last residuals at each horizon, scaled by each exponent, and the exponents' losses."""

    def __init__(self) -> None:
        shape = (len(EXPONENTS), len(HORIZONS))
        # A ring of residuals per exponent and horizon, infinite where there is none yet.
        self._rings = np.full((*shape, WINDOW), np.inf)
        self._ordered = self._rings.copy()
        self._counts = np.zeros(len(HORIZONS), dtype=np.int64)
        self._losses = np.zeros(shape)

    def add(self, value: float, forecasts: Forecast, floor: float) -> None:
        """Add the errors of forecasts of `value` at the first horizons."""
        due = len(forecasts)
        scales = np.maximum(forecasts, floor) ** EXPONENTS[:, None]
        enough = int((self._counts[:due] >= ENOUGH).sum())
        if enough:
            residuals = self._order_statistics(SCORED)[:, :enough]
            errors = value - np.maximum(forecasts[:enough] + residuals * scales[:, :enough], 0.0)
            losses = np.maximum(SCORED * errors, (SCORED - 1) * errors)
            self._losses[:, :enough] = LOSS_DECAY * self._losses[:, :enough] + losses
        columns = np.arange(due)
        self._rings[:, columns, self._counts[:due] % WINDOW] = (value - forecasts) / scales
        self._counts[:due] += 1
        self._ordered[:, :due] = np.sort(self._rings[:, :due], axis=2)

    def quantiles(self, quantile: float) -> tuple[Forecast, Forecast]:
        """The scaled residual and the exponent with the least loss, at each horizon."""
        enough = int((self._counts >= ENOUGH).sum())
        if not enough:
            normal = NormalDist().inv_cdf(quantile)
            return np.full(len(HORIZONS), normal), np.full(len(HORIZONS), 0.5)
        # Longer horizons without enough residuals have those of the longest one that has.
        columns = np.minimum(np.arange(len(HORIZONS)), enough - 1)
        best = self._losses.argmin(axis=0)[columns]
        return self._order_statistics(quantile)[best, columns], EXPONENTS[best]

    def _order_statistics(self, quantile: float) -> Forecast:
        """The residuals that a new one exceeds with chance 1 - `quantile`."""
        if self._counts[-1] >= WINDOW:
            # All windows are full: the same place in each. The general case below takes longer.
            place = min(max(quantile * (WINDOW + 1) - 1, 0.0), WINDOW - 1.0)
            first = int(place)
            lower = self._ordered[:, :, first]
            upper = self._ordered[:, :, min(first + 1, WINDOW - 1)]
            full: Forecast = lower + (upper - lower) * (place - first)
            return full
        last = np.minimum(self._counts, WINDOW) - 1
        position = np.clip(quantile * (last + 2) - 1, 0.0, np.maximum(last, 0))
        low = position.astype(np.int64)
        high = np.minimum(low + 1, np.maximum(last, 0))
        columns = np.arange(len(HORIZONS))
        below, above = self._ordered[:, columns, low], self._ordered[:, columns, high]
        share = position - low
        with np.errstate(invalid="ignore"):
            statistics: Forecast = np.where(share > 0, below + (above - below) * share, below)
        return statistics
