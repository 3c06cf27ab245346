"""The burst reserve: load that returns faster than workers start, again and again.

A fleet that follows the load is late by the start-up time, except where a forecast has predicted a
burst. Past loads are played through a queue that such a fleet would serve; where its late requests
are more than the promises permit, and came more than once, workers are kept for the load at which
they would not be. Once forecasts have predicted the last bursts, none are kept.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil, sqrt

REMEMBERED_S = 4 * 3600.0
SMOOTHED = 3  # intervals whose mean the following fleet is sized for
NOTICED = 2  # intervals until a rise is noticed
HEADROOM = 1.25  # capacity of a fleet over the load for which it keeps its promises
SHARE = 0.5  # of the requests that promises leave open; others are late for other reasons
NOISE = 3.0  # deviations of a Poisson process that are no burst
RETURNS = 2  # late periods that show that the load returns; one is no reason to expect another
CHECK_EVERY = 6  # intervals
STEPS = 7  # of the bisection


class BurstReserve:
    """Counts and forecasts of the last hours, and the load for which workers are to be kept."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        remembered = int(REMEMBERED_S / interval_s)
        self._counts: deque[int] = deque(maxlen=remembered)
        self._forecasts: deque[float] = deque(maxlen=remembered)
        self._asked: tuple[float, Sequence[tuple[float, float]]] | None = None
        self._unchecked = 0
        self._level = 0.0

    def observe(self, count: int, forecast: float = 0.0) -> None:
        """Add the arrivals of the next interval, and the forecast made in it, per interval.

        A forecast is the most that was expected until workers started then would be ready.
        """
        self._counts.append(count)
        self._forecasts.append(forecast)
        self._unchecked += 1

    def level(self, startup_s: float, hold_s: float, waits: Sequence[tuple[float, float]]) -> float:
        """Arrivals per second for which workers are to be kept; 0 without a reason.

        `startup_s` is the time until a new worker is ready, `hold_s` that for which a past need
        keeps workers. `waits` are promises: a quantile, and its bound of the wait in seconds.
        """
        asked = startup_s, waits
        if self._counts and (self._unchecked >= CHECK_EVERY or asked != self._asked):
            self._unchecked, self._asked = 0, asked
            self._level = self._least(startup_s, hold_s, waits)
        return self._level

    def _least(
        self, startup_s: float, hold_s: float, waits: Sequence[tuple[float, float]]
    ) -> float:
        counts = list(self._counts)
        lag = ceil(startup_s / self._interval_s) + NOTICED
        held = ceil(hold_s / self._interval_s)
        loads = _smoothed(counts)
        followed = _followed(loads, lag, held)
        predicted = _followed(list(self._forecasts), lag - NOTICED, held)
        sized = [max(each) for each in zip(followed, predicted, strict=True)]
        bounds = []  # of the waits that need workers, with the requests that may be late
        for quantile, bound_s in waits:
            bound = bound_s / self._interval_s
            bursts = _bursts(_late(counts, followed, 0.0, bound, lag), lag)
            missed = set(_late(counts, sized, 0.0, bound, lag))
            if any(missed.intersection(burst) for burst in bursts[-RETURNS:]):
                bounds.append((bound, SHARE * (1 - quantile) * sum(counts)))

        def suffices(level: float) -> bool:
            for bound, permitted in bounds:
                late = _late(counts, sized, level, bound, lag)
                if len(_bursts(late, lag)) >= RETURNS and sum(counts[n] for n in late) > permitted:
                    return False
            return True

        if suffices(0.0):
            return 0.0
        low, high = 0.0, max(loads)
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
        return high / self._interval_s


def _smoothed(counts: Sequence[int]) -> list[float]:
    """The mean of each count and those before it, SMOOTHED in all."""
    sums: list[float] = []
    total = 0
    for number, count in enumerate(counts):
        total += count - (counts[number - SMOOTHED] if number >= SMOOTHED else 0)
        sums.append(total / min(number + 1, SMOOTHED))
    return sums


def _followed(loads: Sequence[float], lag: int, held: int) -> list[float]:
    """The load that a following fleet is sized for in each interval: the most of past ones."""
    followed: list[float] = []
    window: deque[int] = deque()  # intervals with falling loads
    for number in range(len(loads)):
        newest = number - lag
        if newest >= 0:
            while window and loads[window[-1]] <= loads[newest]:
                window.pop()
            window.append(newest)
        while window and window[0] < newest - held:
            window.popleft()
        followed.append(loads[window[0]] if window else 0.0)
    return followed


def _late(
    counts: Sequence[int], followed: Sequence[float], level: float, bound: float, lag: int
) -> list[int]:
    """Intervals whose requests wait for over `bound` of them if `level` is kept.

    Only those of bursts count: a fleet that keeps its promises for a load bears the noise of it.
    """
    if lag <= bound:  # new workers are ready in time
        return []
    late: list[int] = []
    queue, arrived = 0.0, 0
    for number, count in enumerate(counts):
        load = max(followed[number], level)
        capacity = HEADROOM * load
        arrived += count - (counts[number - lag] if number >= lag else 0)
        expected = load * lag
        if capacity >= count:  # new workers are ready, and more of them work off what waits
            queue -= queue / lag
        queue = max(queue + count - capacity, 0.0)
        if queue > bound * capacity and arrived > expected + NOISE * sqrt(expected):
            late.append(number)
    return late


def _bursts(late: Sequence[int], lag: int) -> list[list[int]]:
    """Late intervals in groups, those of a group no more than `lag` apart."""
    bursts: list[list[int]] = []
    for number in late:
        if not bursts or number - bursts[-1][-1] > lag:
            bursts.append([])
        bursts[-1].append(number)
    return bursts
