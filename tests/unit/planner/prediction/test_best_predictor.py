"""`best` follows the candidate that predicts best at the horizons asked for."""

import numpy as np
import pytest

from kvmesh.planner.prediction.best import BestPredictor, pinball
from kvmesh.planner.prediction.registry import make_predictor


def best() -> BestPredictor:
    predictor = make_predictor("best", 10.0)
    assert isinstance(predictor, BestPredictor)
    return predictor


def test_on_off_traffic_is_left_to_the_seasonal_predictor() -> None:
    predictor = best()
    on = np.arange(400) % 30 < 15
    for value in np.random.default_rng(0).poisson(np.where(on, 60, 2)):
        predictor.observe(float(value))
        predictor.predict(6, 0.9)
    assert predictor.chosen == "seasonal"
    assert predictor.losses["seasonal"] == pytest.approx(1, rel=0.1)
    assert predictor.losses["moving-average"] > 1.5


def test_a_random_walk_is_not_left_to_the_moving_average() -> None:
    predictor = best()
    for value in np.maximum(500 + np.random.default_rng(0).normal(0, 5, 500).cumsum(), 0):
        predictor.observe(float(value))
    assert predictor.chosen in ("constant", "kalman", "seasonal")
    assert predictor.losses["moving-average"] > 1.1


def test_the_prediction_is_that_of_the_chosen_candidate() -> None:
    predictor, alone = best(), make_predictor("kalman", 10.0)
    for value in np.random.default_rng(0).poisson(10, 5):
        predictor.observe(float(value))
        alone.observe(float(value))
    assert predictor.chosen == "kalman"
    assert predictor.predict(4, 0.9) == alone.predict(4, 0.9)


def test_losses_are_equal_until_predictions_come_due() -> None:
    predictor = best()
    predictor.observe(1.0)
    assert set(predictor.losses.values()) == {1.0}


def test_only_the_last_questions_are_scored() -> None:
    predictor = best()
    for steps in range(1, 40):
        predictor.observe(1.0)
        predictor.predict(steps, 0.9)
    assert len(predictor._questions) == 4


@pytest.mark.parametrize(
    ("value", "predicted", "loss"), [(12, 10, 1.8), (10, 12, 0.2), (10, 10, 0)]
)
def test_the_pinball_loss_of_a_high_quantile(value: float, predicted: float, loss: float) -> None:
    assert pinball(value, predicted, 0.9) == pytest.approx(loss)
