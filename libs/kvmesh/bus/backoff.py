"""The wait before the next attempt: longer after each one, and at random. Pure."""

import random
from collections.abc import Callable


class Backoff:
    """Delays between 0 and a ceiling that doubles from `first_s` to `most_s` ("full jitter").

    Those who lost the same server at the same moment come back at different ones.
    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """

    def __init__(
        self,
        first_s: float,
        most_s: float,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._uniform = uniform
        self._ceiling_s = first_s

    def reset(self) -> None:
        """All was well for a while: the next delay is a short one again."""
        self._ceiling_s = self._first_s

    def delay(self) -> float:
        """Seconds to wait now."""
        delay = self._uniform(0.0, self._ceiling_s)
        self._ceiling_s = min(self._most_s, 2 * self._ceiling_s)
        return delay
