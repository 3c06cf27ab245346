"""The seasonal predictor: periods found, drift, and the local trend as its fallback."""

import numpy as np
import pytest

from kvmesh.planner.prediction.kalman import LocalTrend
from kvmesh.planner.prediction.periods import find_period
from kvmesh.planner.prediction.seasonal import Seasonal


def on_off(period: int, count: int, seed: int = 0) -> np.ndarray:
    """Poisson counts with a mean of 50 in the first half of each period, else 1."""
    on = np.arange(count) % period < period // 2
    return np.random.default_rng(seed).poisson(np.where(on, 50, 1)).astype(np.float64)


@pytest.mark.parametrize("period", [8, 24, 60, 144])
@pytest.mark.parametrize("periods", [2.5, 5, 20])
def test_the_period_of_on_off_traffic_is_found(period: int, periods: float) -> None:
    found = find_period(on_off(period, int(period * max(periods, 32 / period))))
    assert found is not None
    assert abs(found.length - period) <= max(1, period // 40)
    assert found.strength > 0.6


def test_a_day_with_noise_and_a_trend_is_found() -> None:
    time = np.arange(3 * 1440)
    mean = 20 + 15 * np.sin(2 * np.pi * time / 1440) + time / 400
    found = find_period(np.random.default_rng(1).poisson(mean).astype(np.float64))
    assert found is not None
    assert abs(found.length - 1440) <= 1440 // 20


@pytest.mark.parametrize("seed", range(10))
def test_counts_without_a_season_have_no_period(seed: int) -> None:
    generator = np.random.default_rng(seed)
    assert find_period(generator.poisson(10, 300).astype(np.float64)) is None
    assert find_period(generator.negative_binomial(1, 0.05, 300).astype(np.float64)) is None


def test_a_constant_series_has_no_period() -> None:
    assert find_period(np.full(100, 3.0)) is None
    assert find_period(np.zeros(0)) is None


def test_the_next_period_is_forecast() -> None:
    series = on_off(24, 24 * 5)
    model = Seasonal(10.0)
    for value in series:
        model.observe(float(value))
    forecast = model.forecast(48)
    on = np.arange(48) % 24 < 12
    assert np.allclose(forecast[on], 50, atol=12)
    assert np.all(forecast[~on] < 8)


def test_a_period_that_drifts_is_followed() -> None:
    """The intervals become 1 % longer: over 20 periods the phase moves by more than an interval."""
    phase = (np.arange(24 * 20) / 1.01) % 24
    series = np.where(phase < 12, 50.0, 1.0)
    model, errors = Seasonal(10.0), []
    for index, value in enumerate(series[:-6]):
        model.observe(float(value))
        if index > 24 * 4:
            errors.append(abs(model.forecast(6)[5] - series[index + 6]))
    assert np.mean(errors) < 6


def test_the_noise_of_a_low_phase_moves_no_burst() -> None:
    generator = np.random.default_rng(2)
    series = generator.poisson(np.where(np.arange(120 * 8) % 120 < 60, 24.0, 2.0))
    model = Seasonal(10.0)
    for place, value in enumerate(series):
        model.observe(float(value))
        begins = place + 1 + np.arange(30)
        if place >= 120 * 4 and place % 120 == 109:  # the burst begins ten intervals later
            forecast = model.forecast(30)
            assert np.all(forecast[begins % 120 < 54][-15:] > 15)
            assert np.all(forecast[:6] < 8)


def test_before_two_periods_the_local_trend_forecasts() -> None:
    model, trend = Seasonal(10.0), LocalTrend()
    for value in on_off(60, 100):
        model.observe(float(value))
        trend.observe(float(value))
    assert model.period is None
    assert np.array_equal(model.forecast(10), trend.forecast(10))


def test_a_season_that_ends_gives_way_to_the_local_trend() -> None:
    model = Seasonal(10.0)
    for value in [*on_off(24, 240), *[200.0] * 2]:
        model.observe(float(value))
    assert model.forecast(20).min() > 120


def test_the_history_is_bounded() -> None:
    model = Seasonal(3600.0)
    for value in on_off(24, 9000):
        model.observe(float(value))
    forecast = model.forecast(24)
    assert forecast.max() > 35
    assert forecast.min() < 10
