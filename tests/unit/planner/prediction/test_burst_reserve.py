"""The burst reserve: kept for load that returns faster than workers start, and only for that."""

from collections.abc import Iterable
from itertools import repeat

import numpy as np

from kvmesh.planner.prediction.reserve import REMEMBERED_S, BurstReserve

INTERVAL_S = 10.0
HIGH, LOW = 24.0, 2.0  # requests per interval
WAITS = [(0.95, 5.0)]


def counts(*phases: tuple[float, int], seed: int = 0) -> np.ndarray:
    """Poisson counts of phases: the mean per interval, and the number of intervals."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.poisson(mean, length) for mean, length in phases])


def levels(
    values: Iterable[float],
    waits: list[tuple[float, float]] = WAITS,
    startup_s: float = 60.0,
    forecasts: Iterable[float] = repeat(0.0),
) -> list[float]:
    """The reserve after each interval."""
    reserve, found = BurstReserve(INTERVAL_S), []
    for value, forecast in zip(values, forecasts, strict=False):
        reserve.observe(int(value), forecast)
        found.append(reserve.level(startup_s, 60.0, waits))
    return found


def predicted(periods: int, since: int) -> list[float]:
    """Forecasts of as many periods of ON_OFF that see bursts a minute ahead from one period on."""
    ahead = 6
    return [
        HIGH if number + ahead >= since * 120 and (number + ahead) % 120 < 60 else LOW
        for number in range(periods * 120)
    ]


ON_OFF = ((HIGH, 60), (LOW, 60))


def test_a_burst_that_has_returned_has_its_workers_kept() -> None:
    found = levels(counts(*ON_OFF, *ON_OFF, *ON_OFF))
    assert max(found[:115]) * INTERVAL_S < HIGH / 4
    assert all(0.7 * HIGH < level * INTERVAL_S < 1.2 * HIGH for level in found[140:])


def test_none_is_kept_once_forecasts_have_predicted_two_bursts() -> None:
    found = levels(counts(*ON_OFF * 6), forecasts=predicted(6, since=2))
    assert all(level * INTERVAL_S > 0.7 * HIGH for level in found[140:360])
    assert max(found[380:]) == 0.0  # the second burst that was predicted has begun at 360


def test_it_is_kept_again_once_forecasts_have_missed_two_bursts() -> None:
    forecasts = predicted(6, since=0)
    forecasts[470:] = [LOW] * 250
    found = levels(counts(*ON_OFF * 6), forecasts=forecasts)
    assert max(found[:480]) == 0.0
    assert found[-1] * INTERVAL_S > HIGH / 2


def test_one_burst_is_no_reason_to_expect_another() -> None:
    found = levels(counts((9.0, 120), (36.0, 60), (9.0, 180)))
    assert max(found) * INTERVAL_S < 1.3 * 9.0


def test_a_steady_load_and_a_slow_day_need_no_reserve_above_them() -> None:
    assert max(levels(counts((16.0, 360)))) * INTERVAL_S <= 16.0
    day = 4.0 + 20.0 * np.sin(np.linspace(0.0, np.pi, 1000))
    assert max(levels(day)) * INTERVAL_S < 12.0


def test_a_promise_that_waits_for_new_workers_needs_none() -> None:
    values = counts(*ON_OFF, *ON_OFF, *ON_OFF)
    assert max(levels(values, [(0.95, 300.0)])) == 0.0
    assert max(levels(values, [])) == 0.0


def test_a_laxer_quantile_needs_less() -> None:
    values = counts(*ON_OFF, *ON_OFF, *ON_OFF)
    assert levels(values, [(0.3, 5.0)])[-1] < levels(values)[-1]


def test_bursts_are_forgotten() -> None:
    reserve = BurstReserve(INTERVAL_S)
    for value in counts(*ON_OFF, *ON_OFF, (LOW, int(REMEMBERED_S / INTERVAL_S))):
        reserve.observe(int(value))
    assert reserve.level(60.0, 60.0, WAITS) * INTERVAL_S < HIGH / 4


def test_nothing_seen_needs_no_reserve() -> None:
    assert BurstReserve(INTERVAL_S).level(60.0, 60.0, WAITS) == 0.0
    assert max(levels([0] * 50)) == 0.0
