"""Scores predictors on a series that has already come.

The rolling-origin evaluation of Tashman ("Out-of-sample tests of forecasting accuracy", 2000): at
each interval a predictor sees the values up to there and predicts the next ones.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvmesh.planner.prediction.interface import PredictorError
from kvmesh.planner.prediction.registry import make_predictor, predictor_names

UPPER = 0.9
# Intervals that predictors see before the first scored prediction.
WARM_UP = 20


def pinball(value: float, predicted: float, quantile: float) -> float:
    """The loss of a predicted quantile; least in the mean for the true one (Koenker 1978)."""
    error = value - predicted
    return quantile * error if error >= 0 else (quantile - 1) * error


class HorizonScore(Struct, frozen=True, kw_only=True):
    """Errors of the predictions so many steps ahead, over `count` of them.

    `mae` and the pinball losses are in the unit of the series. `mape` is the mean of the absolute
    error over the value, where that is not 0; None if it always is. `coverage90` is the share of
    values at most the predicted 0.9 quantile.
    """

    steps: int
    count: int
    mae: float
    mape: float | None
    pinball50: float
    pinball90: float
    coverage90: float


class PredictorScore(Struct, frozen=True, kw_only=True):
    """The scores of one predictor by horizon."""

    name: str
    horizons: list[HorizonScore]


class Backtest(Struct, frozen=True, kw_only=True):
    """Scores of predictors on one series; `best` has the least 0.9 loss at the start-up horizon."""

    interval_s: float
    startup_steps: int
    values: int
    mean: float
    largest: float
    predictors: list[PredictorScore]
    best: str


def backtest(
    series: Sequence[float],
    interval_s: float,
    startup_s: float,
    names: Sequence[str] | None = None,
) -> Backtest:
    """Scores of the named predictors (all) at one interval, half the start-up time and all of it.

    Raises PredictorError for an unknown name, ValueError for a series too short to score.
    """
    unknown = set(names or ()) - set(predictor_names())
    if unknown:
        raise PredictorError(
            f"unknown predictor {', '.join(sorted(unknown))}; known: {', '.join(predictor_names())}"
        )
    startup = max(1, round(startup_s / interval_s))
    horizons = sorted({1, max(1, startup // 2), startup})
    if len(series) < WARM_UP + startup:
        raise ValueError(
            f"{len(series)} intervals of {interval_s:g} s are too few to score predictions "
            f"{startup} intervals ahead: at least {WARM_UP + startup}"
        )
    scores = [_score(name, series, interval_s, horizons) for name in names or predictor_names()]
    best = min(scores, key=lambda each: each.horizons[-1].pinball90)
    return Backtest(
        interval_s=interval_s,
        startup_steps=startup,
        values=len(series),
        mean=float(np.mean(series)),
        largest=float(np.max(series)),
        predictors=scores,
        best=best.name,
    )


def _score(
    name: str, series: Sequence[float], interval_s: float, horizons: Sequence[int]
) -> PredictorScore:
    predictor = make_predictor(name, interval_s)
    medians: deque[list[float]] = deque(maxlen=horizons[-1])
    uppers: deque[list[float]] = deque(maxlen=horizons[-1])
    rows: dict[int, list[tuple[float, float, float]]] = {steps: [] for steps in horizons}
    for index, value in enumerate(series):
        for steps in horizons:
            if index - steps >= WARM_UP - 1:
                median, upper = medians[-steps][steps - 1], uppers[-steps][steps - 1]
                rows[steps].append((value, median, upper))
        predictor.observe(value)
        medians.append(predictor.predict(horizons[-1]))
        uppers.append(predictor.predict(horizons[-1], UPPER))
    scores = [_horizon_score(steps, rows[steps]) for steps in horizons]
    return PredictorScore(name=name, horizons=scores)


def _horizon_score(steps: int, rows: Sequence[tuple[float, float, float]]) -> HorizonScore:
    errors = [abs(value - median) for value, median, _ in rows]
    relative = [abs(value - median) / value for value, median, _ in rows if value > 0]
    return HorizonScore(
        steps=steps,
        count=len(rows),
        mae=float(np.mean(errors)),
        mape=float(np.mean(relative)) if relative else None,
        pinball50=float(np.mean([pinball(value, median, 0.5) for value, median, _ in rows])),
        pinball90=float(np.mean([pinball(value, upper, UPPER) for value, _, upper in rows])),
        coverage90=float(np.mean([value <= upper for value, _, upper in rows])),
    )
