"""Batch requests, which run in what is left: the fleet does not grow for them."""

from kvmesh.bus.messages import (
    Outcome,
    RouteEvent,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqWait,
    of_class,
)
from kvmesh.runtime.lru import LruCache

MOST_REQUESTS = 65_536
LONGEST_PREFILL_S = 600.0
PARTS = "\x1f"  # between a class and its subdivision


class BatchWork:
    """Tells batch requests by their class, and follows their prompts in engines."""

    def __init__(self) -> None:
        self.classes: frozenset[str] = frozenset()
        # requests in engines: tokens to compute, and the time of their placement
        self._prompts: LruCache[str, tuple[int, float]] = LruCache(MOST_REQUESTS)
        self._placed: LruCache[str, bool] = LruCache(MOST_REQUESTS)

    @property
    def prefill_tokens(self) -> int:
        """Their prompt tokens that engines have yet to compute."""
        found = (self._prompts.peek(name) for name in self._prompts)
        return sum(each[0] for each in found if each is not None)

    def on_sequence(self, event: SeqEvent) -> bool:
        """Apply an event of active sequences; True if it is of a batch request that waits."""
        if isinstance(event, SeqPrefilled | SeqFree):
            self._prompts.pop(event.request)
        if not isinstance(event, SeqWait) or not self.classes:
            return False
        return not self.classes.isdisjoint(event.fair_class.split(PARTS))

    def on_route(self, event: RouteEvent, now: float) -> bool:
        """Apply a decision or an outcome; True if it is of a batch request."""
        if isinstance(event, Outcome):
            self._prompts.pop(event.request)
            return bool(self._placed.pop(event.request))
        if not self.classes or not of_class(event.hints, self.classes):
            return False
        rank = event.prefill or event.chosen
        uncached = event.tokens - sum(rank.overlap) * event.block_size
        self._prompts.put(event.request, (max(uncached, 0), now))
        self._placed.put(event.request, True)
        return True

    def expire(self, now: float) -> None:
        """Forget prompts whose end was lost."""
        for name in list(self._prompts):
            found = self._prompts.peek(name)
            if found is not None and now - found[1] > LONGEST_PREFILL_S:
                self._prompts.pop(name)
