"""The level of the load: long averages while it is steady, short ones after it has changed."""

from collections import deque
from math import sqrt

BUCKET_S = 10.0
WINDOWS = (6, 12, 24, 48, 96, 180)  # buckets
# Deviations of so many buckets that show a burst or its end.
FAST = {1: 5.0, 2: 4.5, 4: 4.0}
DEVIATIONS = 3.7  # some 2,000 tests an hour shall raise few false alarms
MOST_DISPERSION = 3.0


class LoadSeries:
    """Arrivals per bucket of BUCKET_S seconds, over the last half hour.

    The level is the mean of the longest suffix whose parts are consistent with each other, as in
    ADWIN (Bifet and Gavaldà, 2007): noise does not change it, and a step does within a minute.
    Deviations are at least those of a Poisson process.
    """

    def __init__(self) -> None:
        self._buckets: deque[int] = deque(maxlen=WINDOWS[-1])
        self._closed: list[int] = []
        self._current = 0
        self._number: int | None = None
        self.begun: float | None = None  # time at which the first bucket begins
        self.steady = 0  # buckets of the steady suffix
        self.level = 0.0  # arrivals per second now

    def add(self, at: float) -> None:
        """Count an arrival at `at`, which may be a little in the past."""
        self.advance(at)
        self._current += 1

    def take_closed(self) -> list[int]:
        """The values of the buckets closed since the last call."""
        closed, self._closed = self._closed, []
        return closed

    def advance(self, now: float) -> None:
        """Close the buckets that end by `now`."""
        number = int(now // BUCKET_S)
        if self._number is None:
            self._number = number
            self.begun = number * BUCKET_S
        closed: list[int] = []
        for _ in range(min(number - self._number, WINDOWS[-1])):
            closed.append(self._current)
            self._current = 0
        self._number = max(self._number, number)
        if closed:
            self._buckets.extend(closed)
            self._closed = [*self._closed, *closed][-WINDOWS[-1] :]
            self._estimate()

    @property
    def steady_since(self) -> float:
        """Time at which the steady suffix begins."""
        return ((self._number or 0) - self.steady) * BUCKET_S

    @property
    def dispersion(self) -> float:
        """Variance over mean of the steady suffix's buckets; a Poisson process has 1."""
        values = list(self._buckets)[-max(self.steady, WINDOWS[0]) :]
        mean = sum(values) / max(len(values), 1)
        if self.steady < WINDOWS[0] or not mean:
            return 1.0
        return min(max(_variance(values) / mean, 1.0), MOST_DISPERSION)

    def _estimate(self) -> None:
        values = list(self._buckets)
        steady = min(len(values), WINDOWS[0])
        for size in WINDOWS[1:]:
            window = values[-size:]
            older = window[: len(window) - steady]
            if not older or not _consistent(older, window[-steady:]):
                break
            steady = len(window)
        self.steady = steady
        self.level = sum(values[-steady:]) / steady / BUCKET_S
        before = values[-max(steady, WINDOWS[0]) :]
        for fast, deviations in FAST.items():
            recent = values[-fast:]
            if len(before) >= 2 * fast + 2 and _differs(before[:-fast], recent, deviations):
                self.steady, self.level = fast, sum(recent) / fast / BUCKET_S


def _consistent(older: list[int], recent: list[int]) -> bool:
    """Do both parts have one mean, given the dispersion of the recent one?

    The older part's own variance would hide a step within it.
    """
    old, new = sum(older) / len(older), sum(recent) / len(recent)
    dispersion = _variance(recent) / max(new, 0.25)
    error = dispersion * (max(old, 0.25) / len(older) + max(new, 0.25) / len(recent))
    return abs(old - new) <= DEVIATIONS * sqrt(error)


def _variance(values: list[int]) -> float:
    """Variance of one bucket, at least that of a Poisson process."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return max(variance, mean, 0.25)


def _differs(before: list[int], recent: list[int], deviations: float) -> bool:
    """A test that holds for few counts too: square roots of Poisson sums have one variance.

    Anscombe (1948): the variance is 1/4; dispersion beyond Poisson's widens it.
    """
    mean = sum(before) / len(before)
    expected = mean * len(recent)
    dispersion = max(_variance(before) / max(mean, 0.25), 1.0)
    distance = 2 * abs(sqrt(sum(recent) + 3 / 8) - sqrt(expected + 3 / 8))
    return distance > deviations * sqrt(dispersion * (1 + len(recent) / len(before)))
