"""Errors of two predictions of the same requests, made before either learned from them. Pure."""

import math

LEAST = 12.0  # requests before a verdict
MEMORY = 0.98  # weight of a request after the next one


class PairedErrors:
    """Mean errors of a learner (`own`) and its `fallback`, lower is better; older ones fade.

    The verdict changes if the mean difference exceeds its standard error: to `trusted` if the
    learner is better, and from it if it is worse. Until then it is trusted. `count` is the number
    of requests that still weigh.
    """

    def __init__(self) -> None:
        self.trusted = True
        self.count = 0.0
        self._own = 0.0
        self._fallback = 0.0
        self._squares = 0.0

    @property
    def own(self) -> float:
        return self._own / self.count if self.count else 0.0

    @property
    def fallback(self) -> float:
        return self._fallback / self.count if self.count else 0.0

    @property
    def gain(self) -> float:
        """The share of the fallback's error that the learner avoids; negative if it adds to it."""
        return 1.0 - self.own / self.fallback if self.fallback > 0 else 0.0

    def add(self, own: float, fallback: float) -> None:
        """Record the errors on one request."""
        self.count = self.count * MEMORY + 1.0
        self._own = self._own * MEMORY + own
        self._fallback = self._fallback * MEMORY + fallback
        self._squares = self._squares * MEMORY + (own - fallback) ** 2
        if self.count < LEAST:
            return
        worse = self.own - self.fallback
        variance = max(self._squares / self.count - worse * worse, 0.0)
        margin = math.sqrt(variance / self.count)
        if abs(worse) > margin:
            self.trusted = worse < 0
