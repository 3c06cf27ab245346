"""The level of the load is steady under noise, follows steps, and survives odd times."""

from itertools import pairwise
from random import Random

import pytest

from kvmesh.planner.core.arrivals import BUCKET_S, WINDOWS, LoadSeries

START = 1_700_000_000.0


def poisson(series: LoadSeries, start: float, seconds: float, rate: float, seed: int = 0) -> float:
    rng, end = Random(seed), start + seconds
    at = start
    while rate and (at := at + rng.expovariate(rate)) < end:
        series.add(at)
    series.advance(end)
    return end


@pytest.mark.parametrize("rate", [0.05, 0.5, 5.0, 50.0])
def test_the_level_is_the_rate(rate: float) -> None:
    series = LoadSeries()
    poisson(series, START, 1800, rate)
    assert series.level == pytest.approx(rate, rel=max(0.15, 3 / (1800 * rate) ** 0.5))


@pytest.mark.parametrize("rate", [0.5, 3.0, 20.0])
def test_noise_does_not_move_the_level(rate: float) -> None:
    series, now, levels = LoadSeries(), START, []
    for step in range(360):
        now = poisson(series, now, BUCKET_S, rate, step)
        levels.append(series.level)
    jumps = sum(abs(a - b) > 0.15 * rate for a, b in pairwise(levels[60:]))
    assert jumps <= 2


@pytest.mark.parametrize(("before", "after"), [(1.0, 4.0), (5.0, 1.0), (0.2, 3.0), (3.0, 0.0)])
def test_a_step_is_seen_within_a_minute(before: float, after: float) -> None:
    series = LoadSeries()
    now = poisson(series, START, 1200, before)
    poisson(series, now, 60, after, seed=1)
    assert abs(series.level - after) < abs(before - after) / 3 + 0.3


def test_nothing_and_one_request_ever() -> None:
    series = LoadSeries()
    series.advance(START)
    series.advance(START + 3600)
    assert (series.level, series.dispersion) == (0.0, 1.0)
    series.add(START + 3600)
    series.advance(START + 3660)
    assert 0 <= series.level <= 0.1
    series.advance(START + 8000)
    assert series.level == pytest.approx(0.0, abs=1e-3)


def test_late_arrivals_count_in_the_current_bucket() -> None:
    series = LoadSeries()
    series.advance(START)
    series.add(START + 25)
    series.add(START + 3)
    series.advance(START + 30)
    assert series.take_closed() == [0, 0, 2]
    assert series.take_closed() == []


def test_a_jump_of_the_clock_is_bounded() -> None:
    series = LoadSeries()
    now = poisson(series, START, 600, 2.0)
    series.advance(now + 10 * 365 * 86400)
    assert series.level == 0.0
    assert len(series.take_closed()) == WINDOWS[-1]


def test_dispersion_is_that_of_the_arrivals_within_bounds() -> None:
    regular, batches = LoadSeries(), LoadSeries()
    poisson(regular, START, 1800, 3.0)
    for bucket in range(180):
        for _ in range(60 if bucket % 4 == 0 else 0):
            batches.add(START + bucket * BUCKET_S)
    batches.advance(START + 1800)
    assert 1.0 <= regular.dispersion < 1.6
    assert batches.dispersion == 3.0
