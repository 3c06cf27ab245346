"""The interface of predictors of a series."""

from typing import Protocol


class PredictorError(Exception):
    """An unknown predictor; the message says which."""


class Predictor(Protocol):
    """Predicts an equally spaced series of values at least 0, such as requests per interval.

    Pure and deterministic: equal observations give equal predictions.
    """

    def observe(self, value: float) -> None:
        """Add the value of the next interval."""
        ...

    def predict(self, steps: int, quantile: float = 0.5) -> list[float]:
        """Quantiles of the values of the next `steps` intervals, each at least 0.

        Zeros before the first observation.
        """
        ...
