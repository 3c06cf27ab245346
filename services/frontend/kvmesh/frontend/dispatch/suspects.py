"""Requests that may crash engines: a ledger of the losses that count against each, without I/O.

A loss counts against a request if the engine made little progress on it: an engine that reports its
failure, within the request's first tokens; one that vanishes or falls silent, before the first. The
first such loss makes the request a suspect, the second its culprit, unless another suspect on that
engine had made no more progress.
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
        """If a suspect, it goes to `instance`; `tokens()` counts those generated there so far."""
        if request in self._dispatches:
            self._dispatches[request] = instance, tokens

    def lost(self, request: str, instance: str, tokens: int, reported: bool) -> bool:
        """Record that an engine was lost after `tokens` of a request; True if it is the culprit.

        `reported`: the engine has reported its failure itself.
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
        """The request has ended or is cleared."""
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
