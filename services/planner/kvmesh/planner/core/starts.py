"""Workers that are starting, and the start-up time learned from those that became ready."""

from collections import deque
from collections.abc import Iterable
from math import inf

GIVE_UP = 3.0  # times the learned start-up time
LEAST_PATIENCE_S = 30.0  # a busy machine may delay a start that usually takes a second
REMEMBERED = 8
RETRY_S = 1800.0
MOST_START_S = 3600.0  # a card may state anything
REPORTED_S = 5.0  # a worker that starts reports every second


class Starts:
    """The starts of one pool, oldest first. `initial_s` counts until one has been seen.

    A start is seen if its beginning is known: workers that were starting already teach nothing.
    A promotion is the end of a start: of a worker that was parked, its card tells both times.
    """

    def __init__(self, initial_s: float) -> None:
        self._initial_s = initial_s
        self._begun: deque[tuple[float, bool]] = deque()
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._promotions: deque[float] = deque(maxlen=REMEMBERED)
        self._first_promotion_s = inf
        self.failed = 0
        self._failed_at = -inf

    @property
    def blocked_at(self) -> float:
        """The time at which a start was last given up; -inf if workers can start."""
        return self._failed_at

    def remember(self, startup_s: float, blocked_at: float, promotion_s: float = 0.0) -> None:
        """Take over what an earlier planner has learned; `promotion_s` is 0 if unknown."""
        self._initial_s = startup_s
        self._first_promotion_s = promotion_s or inf
        self._failed_at = blocked_at

    @property
    def pending(self) -> int:
        return len(self._begun)

    @property
    def startup_s(self) -> float:
        """Seconds until a new worker is ready: the median of those seen."""
        if not self._took:
            return self._initial_s
        return _median(self._took)

    @property
    def promotion_s(self) -> float:
        """Seconds until a parked worker is ready, likewise; at most a start-up time."""
        known = _median(self._promotions) if self._promotions else self._first_promotion_s
        return min(known, self.startup_s)

    def blocked(self, now: float) -> bool:
        """True while no worker is started because the last one never became ready."""
        return now - self._failed_at < RETRY_S

    def begin(self, count: int, now: float, seen: bool = True) -> None:
        """Count `count` workers that start now, or that had begun before if not `seen`."""
        self._begun.extend([(now, seen)] * count)

    def cancel(self, count: int) -> None:
        """Forget the newest starts, whose workers are stopped before they are ready."""
        for _ in range(min(count, len(self._begun))):
            self._begun.pop()

    def ready(self, now: float, took_s: float = 0.0, promoted_s: float = 0.0) -> None:
        """A worker has joined; it counts as the oldest of those that are starting, if any is.

        It shows that workers can start there again. `took_s` is the time that its start took by its
        card: until a start was seen, none is expected to take less. A worker that was parked tells
        `promoted_s`, the part of it since the promotion.
        """
        self._failed_at = -inf
        self._initial_s = max(self._initial_s, min(took_s, MOST_START_S))
        if self._begun:
            begun, seen = self._begun.popleft()
            if seen and promoted_s <= 0:
                self._took.append(max(now - begun, 0.1))
        if promoted_s > 0:
            self._promotions.append(min(max(promoted_s, 0.1), MOST_START_S))
            self._took.append(min(max(took_s, promoted_s, 0.1), MOST_START_S))

    def give_up(self, now: float, reported: int = 0) -> int:
        """Give up the starts that took too long; returns their number.

        As many as workers have `reported` that they start go on, for MOST_START_S at least.
        """
        limit = max(GIVE_UP * self.startup_s, LEAST_PATIENCE_S)
        late = self._older(now, limit)
        silent = min(late, max(self.pending - reported, 0))
        given_up = max(silent, self._older(now, max(limit, MOST_START_S)))
        for _ in range(given_up):
            self._begun.popleft()
        if given_up:
            self.failed += given_up
            self._failed_at = now
        return given_up

    def _older(self, now: float, limit_s: float) -> int:
        return sum(now - begun > limit_s for begun, _ in self._begun)


class ReportedStarts:
    """The workers of one model that report that they start."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}

    def heard(self, instance: str, now: float) -> None:
        self._heard[instance] = now

    def count(self, now: float) -> int:
        """Those heard in the last REPORTED_S; the others have joined, or have ended."""
        self._heard = {i: at for i, at in self._heard.items() if now - at <= REPORTED_S}
        return len(self._heard)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
