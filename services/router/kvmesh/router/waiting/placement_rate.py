"""The rate at which a router places uncached tokens."""

from kvmesh.bus.messages import Decision

SMOOTHED_S = 10.0
LEAST_S, MOST_S = 1.0, 60.0


class PlacementRate:
    """Tokens per second, smoothed over about SMOOTHED_S."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._updated = 0.0

    def add(self, decision: Decision, now: float) -> None:
        cached = sum(decision.chosen.overlap) * decision.block_size
        share = min((now - self._updated) / SMOOTHED_S, 1.0)
        if share > 0:
            self._rate *= 1 - share
            self._updated = now
        self._rate += max(decision.tokens - cached, 0) / SMOOTHED_S

    def seconds(self, tokens: float) -> float:
        """Expected seconds until so many tokens are placed, LEAST_S to MOST_S."""
        if self._rate <= 0:
            return LEAST_S
        return min(max(tokens / self._rate, LEAST_S), MOST_S)
