"""Values that all viewers share, computed at most once in a while. Pure."""

from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class Shared(Generic[V]):
    """The value of `compute`, at most `age_s` seconds old by `clock`, in seconds, monotonic."""

    def __init__(
        self, compute: Callable[[], V], clock: Callable[[], float], age_s: float = 1.0
    ) -> None:
        self._compute = compute
        self._clock = clock
        self._age_s = age_s
        self._value: V | None = None
        self._at = float("-inf")

    def __call__(self) -> V:
        now = self._clock()
        if self._value is None or now - self._at >= self._age_s:
            self._value, self._at = self._compute(), now
        return self._value
