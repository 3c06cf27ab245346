"""Arrivals expected soon: the level of the load, its prediction, and bursts."""

from collections.abc import Sequence
from math import ceil, sqrt

from kvmesh.planner.core.arrivals import BUCKET_S, LoadSeries
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.prediction.registry import make_predictor
from kvmesh.planner.prediction.reserve import BurstReserve

CERTAIN = 2.0  # deviations by which a prediction must exceed the level to count


class Demand:
    """The arrivals of one model."""

    def __init__(self, predictor: str) -> None:
        self.series = LoadSeries()
        self._predictor = make_predictor(predictor, BUCKET_S)
        self._reserve = BurstReserve(BUCKET_S)
        self._forecast = 0.0  # the latest one, until its interval has passed

    def arrived(self, at: float) -> None:
        """Count an arrival."""
        self.series.add(at)

    def advance(self, now: float) -> None:
        """Let time pass, before a decision."""
        self.series.advance(now)
        for value in self.series.take_closed():
            self._predictor.observe(value)
            self._reserve.observe(value, self._forecast * BUCKET_S)
            self._forecast = 0.0

    def forecast(self, horizon_s: float) -> float:
        """Arrivals per second for which workers are needed within `horizon_s` seconds.

        The level now, unless the series predicts clearly more.
        """
        level = self.series.level
        steps = max(ceil(horizon_s / BUCKET_S), 1)
        predicted = max(self._predictor.predict(steps, 0.5)) / BUCKET_S
        noise = sqrt(self.series.dispersion * level / BUCKET_S / 2)
        self._forecast = predicted if predicted > level + CERTAIN * noise else level
        return self._forecast

    def reserved(self, startup_s: float, hold_s: float, promises: Sequence[Promise]) -> float:
        """Arrivals per second for which workers are kept, since bursts return."""
        waits = [
            (promise.quantile, promise.seconds)
            for promise in promises
            if promise.metric != "itl" and not promise.request_class
        ]
        return self._reserve.level(startup_s, hold_s, waits)
