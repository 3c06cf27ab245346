"""The requests that may be killing engines: bookkeeping of lost placements, without I/O.

A placement counts against its request if the engine had not got far with it: an engine that says
itself that it failed, within the request's first tokens; one that vanishes or falls silent, before
the first. The first such loss makes a request a suspect, the second one its culprit, unless another
suspect on that engine had got no further.
"""

from collections.abc import Callable

PROVEN_TOKENS = 64  # an engine that has made this many of a request does not die of it
REMEMBERED = 256


class Suspects:
    """Requests with one loss that counts against them, and on which engine each is now."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, Callable[[], int]] | None] = {}
        self._explained: dict[str, None] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._places

    def placed(self, request: str, instance: str, tokens: Callable[[], int]) -> None:
        """An engine is given a suspect; `tokens()` is how many it has made of it so far."""
        if request in self._places:
            self._places[request] = instance, tokens

    def lost(self, request: str, instance: str, tokens: int, reported: bool) -> bool:
        """Note that an engine was lost after `tokens` of a request; True if it is the culprit.

        `reported` says that the engine told of its failure itself.
        """
        if tokens >= (PROVEN_TOKENS if reported else 1):
            self.forget(request)
            return False
        suspected = request in self._places
        if suspected and not self._is_explained(instance, request, tokens):
            self._explain(instance)
            self.forget(request)
            return True
        if suspected or instance not in self._explained:
            self._places[request] = None
        return False

    def forget(self, request: str) -> None:
        """It has ended, or is cleared."""
        self._places.pop(request, None)

    def _is_explained(self, instance: str, request: str, tokens: int) -> bool:
        """Whether somebody else may have been it."""
        there = [
            place[1]()
            for other, place in self._places.items()
            if other != request and place is not None and place[0] == instance
        ]
        return instance in self._explained or any(made <= tokens for made in there)

    def _explain(self, instance: str) -> None:
        self._explained[instance] = None
        while len(self._explained) > REMEMBERED:
            del self._explained[next(iter(self._explained))]
