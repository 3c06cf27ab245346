"""The requests of a batch that have yet to be executed. Pure: the time is a parameter."""

import heapq
from collections.abc import Iterable, Iterator
from math import inf

FIRST_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class BatchProgress:
    """Requests by their number: those to execute, running, and `done`.

    One that could not be served now is executed again later, with longer and longer waits.
    """

    def __init__(self, total: int, done: Iterable[int]) -> None:
        self._done = bytearray(total)
        for number in done:
            self._done[number] = True
        self._left = total - sum(self._done)
        self._next = 0
        self._later: list[tuple[float, int]] = []
        self._tries: dict[int, int] = {}
        self._paused_until = -inf

    @property
    def finished(self) -> bool:
        return not self._left

    @property
    def rest(self) -> Iterator[int]:
        """The requests that have not ended."""
        return (number for number, done in enumerate(self._done) if not done)

    def take(self, now: float) -> int | None:
        """The next request to execute; None if there is none now."""
        if now < self._paused_until:
            return None
        if self._later and self._later[0][0] <= now:
            return heapq.heappop(self._later)[1]
        while self._next < len(self._done):
            self._next += 1
            if not self._done[self._next - 1]:
                return self._next - 1
        return None

    @property
    def due(self) -> float:
        """The time at which a request that has to wait can be taken."""
        return max(self._later[0][0], self._paused_until) if self._later else inf

    def again(self, number: int, now: float, wait_s: float, pauses: bool = False) -> None:
        """Execute a request later, after `wait_s` at least; with `pauses` none before that."""
        if pauses:
            self._paused_until = max(self._paused_until, now + wait_s)
            heapq.heappush(self._later, (now + wait_s, number))
            return
        tries = self._tries[number] = self._tries.get(number, 0) + 1
        backoff = min(FIRST_RETRY_S * 2 ** min(tries - 1, 10), MAX_RETRY_S)
        heapq.heappush(self._later, (now + max(wait_s, backoff), number))

    def end(self, number: int) -> bool:
        """Note the end of a request; False if it had ended before."""
        if self._done[number]:
            return False
        self._done[number] = True
        self._left -= 1
        self._tries.pop(number, None)
        return True
