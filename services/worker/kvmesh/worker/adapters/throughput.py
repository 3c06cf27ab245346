"""Measured throughput of an engine, for the choice between loading and computing."""

MIN_MEASURED_TOKENS = 32
_SMOOTHING = 0.2


class Throughput:
    """Moving mean of units per second; 0 until something was measured."""

    def __init__(self) -> None:
        self.value = 0.0

    def record(self, units: float, seconds: float) -> None:
        """Record that `units` took `seconds`; ignores zeros."""
        if units > 0 and seconds > 0:
            now = units / seconds
            self.value = self.value + _SMOOTHING * (now - self.value) if self.value else now


def combined_throughput(first: float, second: float) -> float:
    """Throughput of two steps in sequence; an unknown first counts as free."""
    if first <= 0 or second <= 0:
        return max(first, second)
    return first * second / (first + second)
