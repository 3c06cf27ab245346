"""The choice of the workers to stop: those whose cache is worth least come first."""

from collections import deque

from kvmesh.bus.messages import Outcome

WORTH_S = 600.0
MOST_HITS = 20_000


class CacheWorth:
    """Prompt tokens that each worker has served from its cache in the last WORTH_S seconds."""

    def __init__(self) -> None:
        self._hits: deque[tuple[float, str, int]] = deque()
        self._worth: dict[str, int] = {}

    def served(self, outcome: Outcome, now: float) -> None:
        if len(self._hits) >= MOST_HITS:
            self._forget()
        self._hits.append((now, outcome.instance, outcome.cached_tokens))
        worth = self._worth.get(outcome.instance, 0)
        self._worth[outcome.instance] = worth + outcome.cached_tokens

    def left(self, instance: str) -> None:
        """Forget a worker, so that its hits are not subtracted from later ones of its name."""
        if self._worth.pop(instance, None) is not None:
            self._hits = deque(hit for hit in self._hits if hit[1] != instance)

    def least(self, instances: list[str], now: float) -> list[str]:
        """The instances, that with the least worth first; equal ones in the given order."""
        while self._hits and now - self._hits[0][0] > WORTH_S:
            self._forget()
        return sorted(instances, key=lambda instance: self._worth.get(instance, 0))

    def _forget(self) -> None:
        _, instance, tokens = self._hits.popleft()
        worth = self._worth.get(instance, 0) - tokens
        if worth > 0:
            self._worth[instance] = worth
        else:
            self._worth.pop(instance, None)
