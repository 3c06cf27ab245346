"""The predictors by name."""

from collections.abc import Callable

from kvmesh.planner.prediction.calibration import CalibratedPredictor, PointModel
from kvmesh.planner.prediction.constant import LastValue
from kvmesh.planner.prediction.interface import Predictor, PredictorError
from kvmesh.planner.prediction.kalman import LocalTrend
from kvmesh.planner.prediction.seasonal import Seasonal

MODELS: dict[str, Callable[[float], PointModel]] = {
    "seasonal": Seasonal,
    "kalman": lambda _: LocalTrend(),
    "constant": lambda _: LastValue(),
}


def predictor_names() -> list[str]:
    """The names that `make_predictor` takes."""
    return list(MODELS)


def make_predictor(name: str, interval_s: float) -> Predictor:
    """A new predictor of a series with one value every `interval_s` seconds.

    Raises PredictorError for an unknown name.
    """
    if not interval_s > 0:
        raise PredictorError(f"the interval must be above 0 s, not {interval_s:g}")
    model = MODELS.get(name)
    if model is None:
        raise PredictorError(f"unknown predictor {name}; known: {', '.join(predictor_names())}")
    return CalibratedPredictor(model(interval_s))
