"""Arrivals expected soon: the level of the load, its prediction, returning sessions and bursts."""

from collections.abc import Sequence
from math import ceil, sqrt

from kvmesh.bus.messages import Decision, Outcome, RouteEvent
from kvmesh.planner.core.arrivals import BUCKET_S, LoadSeries
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.prediction.registry import make_predictor
from kvmesh.planner.prediction.reserve import BurstReserve
from kvmesh.planner.prediction.returns import ExpectedReturns, ReturnPredictor
from kvmesh.runtime.lru import LruCache

CERTAIN = 2.0  # deviations by which a prediction must exceed the level to count
LIKELY = 1.28  # deviations up to the 0.9 quantile of the returns
MOST_REQUESTS = 8192


class Demand:
    """The arrivals of one model. Sessions are those that requests name in their hints."""

    def __init__(self, predictor: str) -> None:
        self.series = LoadSeries()
        self._first = LoadSeries()  # arrivals that continue no known session
        self._predictor = make_predictor(predictor, BUCKET_S)
        self._returns = ReturnPredictor()
        self._reserve = BurstReserve(BUCKET_S)
        self._forecast = 0.0  # the latest one, until its interval has passed
        # running requests: session, whether it ends with them, prompt tokens
        self._running: LruCache[str, tuple[str, bool, int]] = LruCache(MOST_REQUESTS)
        self.expected = ExpectedReturns(count=0.0, variance=0.0, tokens=0.0)

    def arrived(self, at: float) -> None:
        """Count an arrival."""
        self.series.add(at)

    def on_route(self, event: RouteEvent, now: float) -> None:
        """Follow the session of a decision or an outcome."""
        if isinstance(event, Outcome):
            self._finished(event, now)
        elif event.prefetch is None and not event.attempt:
            self._started(event, now)

    def _started(self, decision: Decision, now: float) -> None:
        session = decision.hints.session
        if session is None or not self._returns.knows(session):
            self._first.add(now)
        if session is not None:
            self._returns.started(session, now)
            final = decision.hints.session_final
            self._running.put(decision.request, (session, final, decision.tokens))

    def _finished(self, outcome: Outcome, now: float) -> None:
        found = self._running.pop(outcome.request)
        if found is not None:
            session, final, prompt = found
            tokens = prompt + outcome.output_tokens
            self._returns.finished(session, now, outcome.finish, final, tokens)

    def advance(self, now: float) -> None:
        """Let time pass, before a decision."""
        self.series.advance(now)
        self._first.advance(now)
        for value in self.series.take_closed():
            self._predictor.observe(value)
            self._reserve.observe(value, self._forecast * BUCKET_S)
            self._forecast = 0.0
        self._first.take_closed()

    def forecast(self, now: float, horizon_s: float) -> float:
        """Arrivals per second for which workers are needed within `horizon_s` seconds.

        The level now, unless the series or the sessions that will return predict clearly more.
        """
        level = self.series.level
        steps = max(ceil(horizon_s / BUCKET_S), 1)
        predicted = max(self._predictor.predict(steps, 0.5)) / BUCKET_S
        noise = sqrt(self.series.dispersion * level / BUCKET_S / 2)
        forecast = predicted if predicted > level + CERTAIN * noise else level
        self.expected = self._returns.expected(now, horizon_s)
        others = self._first.level * horizon_s
        returning = (self.expected.count + others) / horizon_s
        deviation = sqrt(self.expected.variance + others) / horizon_s
        if returning > level + CERTAIN * (deviation + noise):
            forecast = max(forecast, returning + LIKELY * deviation)
        self._forecast = forecast
        return forecast

    def reserved(self, startup_s: float, hold_s: float, promises: Sequence[Promise]) -> float:
        """Arrivals per second for which workers are kept, since bursts return."""
        waits = [
            (promise.quantile, promise.seconds)
            for promise in promises
            if promise.metric != "itl" and not promise.request_class
        ]
        return self._reserve.level(startup_s, hold_s, waits)
