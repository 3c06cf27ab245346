"""The predictors by name."""

from collections.abc import Callable

from kvmesh.planner.prediction.averages import LastValue, MovingAverage
from kvmesh.planner.prediction.best import BestPredictor
from kvmesh.planner.prediction.calibration import CalibratedPredictor, PointModel
from kvmesh.planner.prediction.interface import Predictor, PredictorError
from kvmesh.planner.prediction.kalman import LocalTrend
from kvmesh.planner.prediction.seasonal import Seasonal

# `best` chooses among these; the first predicts until the losses differ.
BUILT_IN: dict[str, Callable[[float], PointModel]] = {
    "kalman": lambda _: LocalTrend(),
    "constant": lambda _: LastValue(),
    "moving-average": lambda _: MovingAverage(),
    "seasonal": Seasonal,
}
BEST = "best"


def predictor_names() -> list[str]:
    """The names that `make_predictor` takes."""
    return [BEST, *BUILT_IN]


def make_predictor(name: str, interval_s: float) -> Predictor:
    """A new predictor of a series with one value every `interval_s` seconds.

    Raises PredictorError for an unknown name.
    """
    if not interval_s > 0:
        raise PredictorError(f"the interval must be above 0 s, not {interval_s:g}")
    if name == BEST:
        return BestPredictor({each: make_predictor(each, interval_s) for each in BUILT_IN})
    model = BUILT_IN.get(name)
    if model is None:
        raise PredictorError(f"unknown predictor {name}; known: {', '.join(predictor_names())}")
    return CalibratedPredictor(model(interval_s))
