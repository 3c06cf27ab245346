"""Pace of prefetches that an engine computes in slices, as short requests beside others."""

from math import inf

LOST_SHARE = 0.1
FIRST_TOKEN_S = 0.05
MAX_SLICE_S = 0.1
MAX_PAUSE_S = 10.0
SMOOTHING = 0.2


class PrefetchPacer:
    """Length and start of the next slice on one rank, so that requests lose LOST_SHARE at most.

    A request that arrives while a slice runs waits for its end, on average for half of it: the
    slices' length and their share of the time are bounded by the requests' mean time to the first
    token. Beside decoding requests, slices take LOST_SHARE of the time. None starts while a request
    waits for its first token. All times are in seconds. A slice that took much longer than others,
    as on a machine under other load, delays the next one by MAX_PAUSE_S at most.

    Requests of other clients of the engine count as last polled.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max(1, max_blocks)
        self._mean_first_s = FIRST_TOKEN_S
        self._shortest_s = inf
        self._last_s = 0.0
        self._ended_at = -inf
        self._waiting = 0
        self._decoding = 0
        self._others = 0
        self._others_waiting = 0
        self.blocks = 1

    def begin(self) -> None:
        """Record the start of a request."""
        self._waiting += 1

    def record_first_token(self, seconds: float) -> None:
        """Record a request's first token, `seconds` after its start."""
        self._waiting -= 1
        self._decoding += 1
        self._mean_first_s += SMOOTHING * (seconds - self._mean_first_s)

    def end(self, has_token: bool) -> None:
        """Record the end of a request."""
        self._decoding -= has_token
        self._waiting -= not has_token

    def record_others(self, running: int, waiting: int) -> None:
        """Record how many requests of other clients the engine runs, and how many wait in it."""
        self._others, self._others_waiting = running, waiting

    def record_slice(self, seconds: float, now: float) -> None:
        """Record a slice of `blocks` blocks that ended at `now`; changes `blocks` for the next."""
        self._last_s, self._ended_at = seconds, now
        self._shortest_s = min(seconds, self._shortest_s)
        # half of a slice of twice the shortest is overhead: shorter ones would compute too little
        wanted = min(MAX_SLICE_S, max(2 * self._shortest_s, self._loss_s))
        change = min(2.0, max(0.5, wanted / seconds)) if seconds > 0 else 2.0
        self.blocks = min(self._max_blocks, max(1, int(self.blocks * change)))

    def seconds(self, blocks: int) -> float:
        """Expected time of computing so many blocks on an idle rank."""
        return blocks / self.blocks * self._last_s / self._idle_share

    def pause(self, now: float) -> float | None:
        """Time until the next slice may start; None if a request has to get its token first."""
        if self._waiting or self._others_waiting:
            return None
        share = LOST_SHARE if self._decoding or self._others else self._idle_share
        pause = min(self._last_s * (1 / share - 1), MAX_PAUSE_S)
        return max(0.0, self._ended_at + pause - now)

    @property
    def _loss_s(self) -> float:
        """Length of slices without pauses that cost requests LOST_SHARE of their first token."""
        return 2 * LOST_SHARE * self._mean_first_s

    @property
    def _idle_share(self) -> float:
        return min(1.0, self._loss_s / self._last_s) if self._last_s else 1.0
