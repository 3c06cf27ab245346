"""Predictors of optional libraries: ARIMA of statsmodels, and Prophet.

A library's model is fitted again every `REFIT_EVERY` values, on a bounded history. In between, an
ARIMA model appends values without fitting, and a Prophet model's forecast moves with its last
errors.
"""

import logging
import warnings
from collections import deque
from importlib import import_module
from typing import Any

import numpy as np

from kvmesh.planner.prediction.averages import MovingAverage
from kvmesh.planner.prediction.calibration import HORIZONS, Forecast
from kvmesh.planner.prediction.interface import PredictorError

log = logging.getLogger(__name__)

REFIT_EVERY = 60
HISTORY = 240
# With fewer values, or those of a constant series, a moving average forecasts.
FEWEST = 20
# Orders (p, d, q) from which Akaike's criterion chooses, at each fit of at most so many iterations.
ORDERS = ((1, 0, 0), (2, 0, 1), (0, 1, 1), (1, 1, 1))
ITERATIONS = 20
RECENT_ERRORS = 4
# The day on which Prophet's series starts; any day serves.
ORIGIN = "2024-01-01"


def _library(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise PredictorError(
            f"the predictor {extra} needs a library that is not installed: "
            f"pip install 'kvmesh[{extra}]' ({error})"
        ) from error


class Arima:
    """ARIMA of statsmodels; raises PredictorError if it is not installed: `arima`."""

    def __init__(self) -> None:
        self._model: Any = _library("statsmodels.tsa.arima.model", "arima").ARIMA
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._average = MovingAverage()
        self._fitted: Any = None
        self._age = 0

    def observe(self, value: float) -> None:
        """Add the value of the next interval."""
        self._history.append(value)
        self._average.observe(value)
        self._age += 1
        if len(self._history) < FEWEST or min(self._history) == max(self._history):
            self._fitted = None
        elif self._age >= REFIT_EVERY or len(self._history) == FEWEST:
            self._fitted, self._age = self._fit(), 0
        elif self._fitted is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._fitted = self._fitted.extend([value])

    def forecast(self, steps: int) -> Forecast:
        """The model's forecast, bounded by twice the largest value of its history."""
        average = self._average.forecast(steps)
        if self._fitted is None:
            return average
        forecast = np.asarray(self._fitted.forecast(steps), dtype=np.float64)
        forecast = np.where(np.isfinite(forecast), forecast, average)
        return np.clip(forecast, 0.0, 2 * max(self._history))

    def _fit(self) -> Any:
        """The fitted model with the least criterion; None if none can be fitted."""
        values, fitted = np.array(self._history), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for order in ORDERS:
                try:
                    model = self._model(values, order=order)
                    fitted.append(model.fit(method_kwargs={"maxiter": ITERATIONS}))
                except (ValueError, np.linalg.LinAlgError) as error:
                    log.warning("cannot fit ARIMA%s to %d values: %s", order, len(values), error)
        return min(fitted, key=lambda each: each.aic, default=None)


class Prophet:
    """Prophet's additive model; raises PredictorError if it is not installed: `prophet`."""

    def __init__(self, interval_s: float) -> None:
        # It reports missing plot libraries as errors, and each fit in several lines.
        logging.getLogger("prophet.plot").setLevel(logging.CRITICAL)
        self._model: Any = _library("prophet", "prophet").Prophet
        logging.getLogger("prophet").setLevel(logging.WARNING)
        _library("cmdstanpy.utils.logging", "prophet").get_logger().setLevel(logging.WARNING)
        self._pandas: Any = _library("pandas", "prophet")
        self._interval_s = interval_s
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._errors: deque[float] = deque(maxlen=RECENT_ERRORS)
        self._average = MovingAverage()
        self._count = 0
        self._ahead: Forecast = np.zeros(0)
        self._age = 0

    def observe(self, value: float) -> None:
        """Add the value of the next interval."""
        self._history.append(value)
        self._average.observe(value)
        self._count += 1
        if self._age < len(self._ahead):
            self._errors.append(value - float(self._ahead[self._age]))
        self._age += 1
        if self._age >= REFIT_EVERY or len(self._history) == FEWEST:
            self._ahead, self._age = self._fit(), 0
            self._errors.clear()

    def forecast(self, steps: int) -> Forecast:
        """The fitted forecast plus its mean error over the last values."""
        if not len(self._ahead):
            return self._average.forecast(steps)
        ahead = self._ahead[self._age : self._age + steps]
        ahead = np.pad(ahead, (0, steps - len(ahead)), mode="edge")
        offset = sum(self._errors) / len(self._errors) if self._errors else 0.0
        return np.clip(ahead + offset, 0.0, 2 * max(self._history))

    def _fit(self) -> Forecast:
        """The forecast from the last value on, as far as it serves until the next fit."""
        first = self._count - len(self._history)
        count = len(self._history) + REFIT_EVERY + HORIZONS[-1]
        seconds = (first + np.arange(count)) * self._interval_s
        times = self._pandas.Timestamp(ORIGIN) + self._pandas.to_timedelta(seconds, unit="s")
        known = self._pandas.DataFrame(
            {"ds": times[: len(self._history)], "y": list(self._history)}
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self._model(uncertainty_samples=0).fit(known, seed=1)
            ahead = model.predict(self._pandas.DataFrame({"ds": times[len(self._history) :]}))
        return np.asarray(ahead["yhat"], dtype=np.float64)
