"""The behaviour of all predictors."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvmesh.planner.prediction.interface import Predictor, PredictorError
from kvmesh.planner.prediction.registry import make_predictor, predictor_names

INTERVAL_S = 10.0


@pytest.fixture(params=predictor_names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def after(name: str, values: Sequence[float] | np.ndarray) -> Predictor:
    """A predictor that has observed the values."""
    predictor = make_predictor(name, INTERVAL_S)
    for value in values:
        predictor.observe(float(value))
    return predictor


def poisson(mean: float, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).poisson(mean, count)


def overdispersed(mean: float, count: int, seed: int = 0) -> np.ndarray:
    """Negative binomial counts with a variance of mean + mean²/2."""
    return np.random.default_rng(seed).negative_binomial(2, 2 / (2 + mean), count)


def test_zeros_come_before_the_first_observation(name: str) -> None:
    predictor = make_predictor(name, INTERVAL_S)
    assert predictor.predict(5) == [0.0] * 5
    assert predictor.predict(5, 0.9) == [0.0] * 5


def test_there_is_one_value_per_step(name: str) -> None:
    predictor = after(name, poisson(5, 30))
    assert [len(predictor.predict(steps)) for steps in (0, 1, 7, 96, 97, 300)] == [
        0, 1, 7, 96, 97, 300
    ]  # fmt: skip


def test_a_constant_series_goes_on(name: str) -> None:
    predictor = after(name, [7.0] * 60)
    for quantile in (0.1, 0.5, 0.9):
        assert predictor.predict(20, quantile) == pytest.approx([7.0] * 20, rel=0.01)


def test_a_series_of_zeros_stays_at_zero(name: str) -> None:
    assert after(name, [0.0] * 200).predict(10, 0.9) == pytest.approx([0.0] * 10)


@pytest.mark.parametrize("series", [poisson(0.2, 90), overdispersed(20, 90), poisson(9, 3)])
def test_no_prediction_is_negative(name: str, series: np.ndarray) -> None:
    predictor = after(name, series)
    assert min(predictor.predict(30, 0.01)) >= 0


def test_higher_quantiles_are_not_lower(name: str) -> None:
    for count in (1, 5, 25, 90):
        predictor = after(name, overdispersed(20, count))
        rows = np.array([predictor.predict(30, q) for q in (0.05, 0.3, 0.5, 0.9, 0.99)])
        assert (np.diff(rows, axis=0) >= 0).all()


def test_equal_observations_give_equal_predictions(name: str) -> None:
    series = overdispersed(10, 90)
    first, second = after(name, series), after(name, series)
    assert first.predict(12, 0.9) == second.predict(12, 0.9)


def test_a_query_changes_no_prediction(name: str) -> None:
    series = poisson(10, 90)
    asked, quiet = make_predictor(name, INTERVAL_S), after(name, series)
    for value in series:
        asked.observe(float(value))
        asked.predict(1, 0.9)
    assert asked.predict(1, 0.9) == quiet.predict(1, 0.9)


@pytest.mark.parametrize(("before", "behind"), [(10.0, 100.0), (100.0, 10.0), (0.0, 40.0)])
def test_two_intervals_after_a_level_shift_the_prediction_is_there(
    name: str, before: float, behind: float
) -> None:
    predictor = after(name, [*poisson(before, 100), *poisson(behind, 2, seed=1)])
    assert predictor.predict(1)[0] == pytest.approx(behind, rel=0.4)
    assert predictor.predict(6)[5] == pytest.approx(behind, rel=0.6)


def test_a_burst_after_a_long_gap_of_zeros_is_followed(name: str) -> None:
    predictor = after(name, [*poisson(30, 50), *[0.0] * 400, *poisson(50, 2)])
    assert predictor.predict(1)[0] == pytest.approx(50, rel=0.4)


SERIES = {
    "poisson": poisson(10, 400),
    "sparse": poisson(0.7, 400),
    "overdispersed": overdispersed(20, 400),
    "tokens": 1000.0 * poisson(10, 400),
}


@pytest.mark.parametrize("kind", SERIES)
def test_quantiles_are_calibrated(name: str, kind: str) -> None:
    series = SERIES[kind]
    predictor = make_predictor(name, INTERVAL_S)
    upper: list[list[float]] = []
    for value in series:
        predictor.observe(float(value))
        upper.append(predictor.predict(6, 0.9))
    for steps in (1, 6):
        known = range(50 + steps, len(series))
        predicted = np.array([upper[index - steps][steps - 1] for index in known])
        values = series[known.start :]
        # Counts have ties: the shares below the quantile by half a count, and at most it,
        # enclose 0.9.
        assert np.mean(values < predicted - 0.5) < 0.95
        assert np.mean(values <= predicted) > 0.84


def test_huge_values_are_predicted(name: str) -> None:
    predictor = after(name, 1e12 * (1 + 0.1 * np.sin(np.arange(60.0))))
    assert predictor.predict(3)[2] == pytest.approx(1e12, rel=0.3)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_value_that_is_no_count_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="finite and at least 0"):
        make_predictor(name, INTERVAL_S).observe(value)


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.5])
def test_a_quantile_outside_its_range_is_refused(name: str, quantile: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        after(name, [1.0]).predict(1, quantile)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        PredictorError, match="unknown predictor seasnal; known: seasonal, kalman, constant"
    ):
        make_predictor("seasnal", INTERVAL_S)


def test_an_interval_that_is_not_positive_is_refused() -> None:
    with pytest.raises(PredictorError, match="the interval must be above 0 s"):
        make_predictor("kalman", 0.0)
