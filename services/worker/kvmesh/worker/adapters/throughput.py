"""How fast an engine turns out to be, for whoever weighs loading against computing."""

MIN_MEASURED_TOKENS = 32
_SMOOTHING = 0.2


class Throughput:
    """Units a second as measured so far; 0 until something has been."""

    def __init__(self) -> None:
        self.value = 0.0

    def record(self, units: float, seconds: float) -> None:
        """So many were done in this time; nothing is learned of none."""
        if units > 0 and seconds > 0:
            now = units / seconds
            self.value = self.value + _SMOOTHING * (now - self.value) if self.value else now


def combined_throughput(one: float, other: float) -> float:
    """The speed of what takes two steps, one after the other; one that is not known is free."""
    if one <= 0 or other <= 0:
        return max(one, other)
    return one * other / (one + other)
