"""Requests that may crash engines, found by the engines lost while they ran each. Pure.

A lost engine counts against a request if it made little progress on it: fewer than `PROVEN_TOKENS`
tokens if the engine reported its failure, none if it vanished or fell silent. The first loss that
counts makes the request a suspect. The second makes it the culprit, unless another suspect on the
same engine had at most as many tokens: that one may be the cause, too.
"""

from collections.abc import Callable

PROVEN_TOKENS = 64  # an engine that generated this many tokens of a request does not crash on it
MAX_EXPLAINED = 256


class Suspects:
    """Requests with one counted loss, and the engine that each is on now."""

    def __init__(self) -> None:
        self._dispatches: dict[str, tuple[str, Callable[[], int]] | None] = {}
        self._explained: dict[str, None] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._dispatches

    def dispatched(self, request: str, instance: str, tokens: Callable[[], int]) -> None:
        """Record where a suspect runs; `tokens()` counts those generated on `instance` so far."""
        if request in self._dispatches:
            self._dispatches[request] = instance, tokens

    def lost(self, request: str, instance: str, tokens: int, reported: bool) -> bool:
        """Record that an engine was lost after `tokens` of a request.

        Returns True if the request is the culprit. `reported`: the engine reported its failure.
        """
        if tokens >= (PROVEN_TOKENS if reported else 1):
            self.forget(request)
            return False
        suspected = request in self._dispatches
        if suspected and not self._is_explained(instance, request, tokens):
            self._explain(instance)
            self.forget(request)
            return True
        if suspected or instance not in self._explained:
            self._dispatches[request] = None
        return False

    def forget(self, request: str) -> None:
        """Remove a request that has ended or is cleared of suspicion."""
        self._dispatches.pop(request, None)

    def _is_explained(self, instance: str, request: str, tokens: int) -> bool:
        """True if another suspect may have caused the loss."""
        progress = [
            dispatch[1]()
            for other, dispatch in self._dispatches.items()
            if other != request and dispatch is not None and dispatch[0] == instance
        ]
        return instance in self._explained or any(made <= tokens for made in progress)

    def _explain(self, instance: str) -> None:
        self._explained[instance] = None
        while len(self._explained) > MAX_EXPLAINED:
            del self._explained[next(iter(self._explained))]
