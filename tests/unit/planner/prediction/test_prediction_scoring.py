"""Scores of predictors on a past series."""

import numpy as np
import pytest

from kvmesh.planner.prediction.interface import PredictorError
from kvmesh.planner.prediction.scoring import backtest, pinball


@pytest.mark.parametrize(
    ("value", "predicted", "loss"), [(12, 10, 1.8), (10, 12, 0.2), (10, 10, 0)]
)
def test_the_pinball_loss_of_a_high_quantile(value: float, predicted: float, loss: float) -> None:
    assert pinball(value, predicted, 0.9) == pytest.approx(loss)


def test_a_constant_series_has_no_error() -> None:
    result = backtest([5.0] * 60, 10.0, 60.0)
    assert (result.values, result.mean, result.largest, result.startup_steps) == (60, 5, 5, 6)
    for predictor in result.predictors:
        assert [score.steps for score in predictor.horizons] == [1, 3, 6]
        for score in predictor.horizons:
            assert score.count == 60 - 20 - score.steps + 1
            assert score.mae == pytest.approx(0, abs=0.02)
            assert score.mape == pytest.approx(0, abs=0.01)


def test_the_errors_of_the_last_value_are_those_by_hand() -> None:
    """The median of the past errors of an alternating series is 0 or ±2."""
    series = [4.0, 6.0] * 30
    (score,) = backtest(series, 10.0, 20.0, ["constant"]).predictors
    two_ahead = score.horizons[-1]
    assert two_ahead.steps == 2
    assert two_ahead.mae == 0, "the value before the last one comes again"
    assert two_ahead.coverage90 == 1


def test_the_best_has_the_least_loss_at_the_startup_horizon() -> None:
    on = np.arange(500) % 40 < 20
    series = np.random.default_rng(0).poisson(np.where(on, 50, 1)).tolist()
    result = backtest(series, 10.0, 120.0)
    assert result.best == "seasonal"
    losses = {each.name: each.horizons[-1].pinball90 for each in result.predictors}
    assert min(losses, key=losses.__getitem__) == "seasonal"


def test_scores_are_deterministic() -> None:
    series = np.random.default_rng(0).poisson(10, 80).tolist()
    assert backtest(series, 10.0, 30.0) == backtest(series, 10.0, 30.0)


def test_a_series_of_zeros_has_no_relative_error() -> None:
    (score,) = backtest([0.0] * 40, 10.0, 10.0, ["constant"]).predictors
    assert score.horizons[0].mape is None


def test_a_short_series_is_refused() -> None:
    with pytest.raises(ValueError, match=r"25 intervals of 10 s are too few .* at least 26"):
        backtest([1.0] * 25, 10.0, 60.0)


def test_an_unknown_predictor_is_refused() -> None:
    with pytest.raises(PredictorError, match="unknown predictor oracle"):
        backtest([1.0] * 50, 10.0, 60.0, ["oracle"])
