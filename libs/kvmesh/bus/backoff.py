"""Exponential backoff with full jitter. Pure."""

import random
from collections.abc import Callable


class Backoff:
    """Delays between 0 and a ceiling that doubles from `first_s` to `max_s` ("full jitter").

    Clients that lost a server together reconnect at different times.
    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """

    def __init__(
        self,
        first_s: float,
        max_s: float,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._uniform = uniform
        self._ceiling_s = first_s

    def reset(self) -> None:
        """Start again with short delays."""
        self._ceiling_s = self._first_s

    def delay(self) -> float:
        """The next delay, in seconds."""
        delay = self._uniform(0.0, self._ceiling_s)
        self._ceiling_s = min(self._max_s, 2 * self._ceiling_s)
        return delay
