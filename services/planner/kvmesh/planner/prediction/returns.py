"""The return predictor: expected returns of idle sessions.

An agent's session calls a model, then runs a tool or waits for a person, and returns with a longer
prompt. Each finished request starts an idle time; the next request of the session ends it. The
chance that an idle session returns within a horizon follows from the idle times seen so far in its
group: the finish reason, and the session's own pace. Idle sessions are counted by group and bin of
idle time, so a query costs as much as there are bins, however many sessions are idle.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from kvmesh.planner.prediction.hazards import BINS, EDGES, HazardTable, Survival, bin_of

# Kinds of finish; all but the first two are the last one.
KINDS = ("tool_calls", "stop", "other")
# A session's pace is the decayed geometric mean of its idle times; classes by these bounds, in s.
PACES_S = (1.0, 4.0, 16.0, 64.0)
PACE_SHARE = 0.4
# Paces below the bounds, above them, and unknown.
CLASSES = len(PACES_S) + 2
# Below this chance to return at all, an idle session is forgotten. Rare long idle times are no
# reason: most of the returns within a short horizon come from them.
FORGOTTEN = 0.01
# An end that was never reported: a session whose request started so long ago counts as idle again.
LOST_S = 3600.0
# Between queries, survival is computed again after so many observations.
REFRESH = 64
SLACK = 1024


class ExpectedReturns(Struct, frozen=True, kw_only=True):
    """Expected number of returns, its variance, and the prompt tokens expected with them."""

    count: float
    variance: float
    tokens: float


class _Session(Struct):
    changed: float
    running: int = 0
    group: int = 0
    bin: int = -1
    tokens: int = 0
    log_pace: float = math.nan
    generation: int = 0


class ReturnPredictor:
    """Learns the idle times of sessions and predicts their returns.

    Times are seconds of one clock; a time before an earlier one counts as that one. At most
    `max_sessions` sessions are known: beyond, the one without events for longest is forgotten.
    """

    def __init__(self, max_sessions: int = 100_000) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions must be at least 1, not {max_sessions}")
        self._max = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._origin: float | None = None
        self._now = 0.0
        # (time at which the session reaches its next bin, generation, name), with obsolete entries.
        self._due: list[tuple[float, int, str]] = []
        self._generation = 0
        groups = len(KINDS) * CLASSES
        self._tables = [HazardTable() for _ in range(groups)]
        self._wider = [HazardTable() for _ in KINDS]
        self._survival: list[Survival | None] = [None] * groups
        self._observed = 0
        # Idle sessions by group and bin: their number, sums of their starts and of their tokens.
        self._idle = np.zeros((groups, BINS))
        self._starts = np.zeros((groups, BINS))
        self._tokens = np.zeros((groups, BINS))

    @property
    def idle(self) -> int:
        """The number of sessions that may return."""
        return int(self._idle.sum())

    def __len__(self) -> int:
        """The number of known sessions, running or idle."""
        return len(self._sessions)

    def knows(self, session: str) -> bool:
        """True if the session is running or may return."""
        return session in self._sessions

    def started(self, session: str, now: float) -> None:
        """A request of the session has arrived."""
        now = self._clock(now)
        known = self._touch(session, now)
        if known.bin >= 0:
            idle_s = now - known.changed
            log_idle = math.log(max(idle_s, EDGES[1]))
            self._end_idle(known, idle_s, returned=True)
            before = log_idle if math.isnan(known.log_pace) else known.log_pace
            known.log_pace = before + PACE_SHARE * (log_idle - before)
        elif known.running and now - known.changed > LOST_S:
            known.running = 0
        known.running += 1
        known.changed = now

    def finished(
        self, session: str, now: float, finish: str, final: bool = False, tokens: int = 0
    ) -> None:
        """A request of the session has ended, with a finish reason such as "tool_calls" or "stop".

        `final` ends the session. `tokens` is the length of the prompt with which it would return.
        """
        now = self._clock(now)
        known = self._touch(session, now)
        if known.bin >= 0:
            self._end_idle(known, now - known.changed, returned=False)
        known.running = max(known.running - 1, 0)
        known.changed = now
        if final:
            del self._sessions[session]
        elif known.running == 0:
            kind = KINDS.index(finish) if finish in KINDS else len(KINDS) - 1
            known.group = kind * CLASSES + _pace_class(known.log_pace)
            known.tokens = tokens
            self._place(session, known, 0)

    def expected(self, now: float, horizon_s: float) -> ExpectedReturns:
        """The returns of now idle sessions within the horizon, each session's first one."""
        now = self._clock(now)
        self._advance(now)
        self._refresh(1)
        count = variance = tokens = 0.0
        for group in np.flatnonzero(self._idle.any(axis=1)):
            bins = np.flatnonzero(self._idle[group])
            idle = self._idle[group, bins]
            ages = np.maximum(now - self._starts[group, bins] / idle, 0.0)
            chances = self._survival_of(int(group)).returning(ages, max(horizon_s, 0.0))
            count += float(idle @ chances)
            variance += float(idle @ (chances * (1 - chances)))
            tokens += float(self._tokens[group, bins] @ chances)
        return ExpectedReturns(count=count, variance=variance, tokens=tokens)

    def _clock(self, now: float) -> float:
        # Relative to the first event: the sums of starts would lose digits of Unix times.
        if self._origin is None:
            self._origin = now
        self._now = max(self._now, now - self._origin)
        return self._now

    def _touch(self, session: str, now: float) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session(changed=now)
            if len(self._sessions) > self._max:
                _, oldest = self._sessions.popitem(last=False)
                if oldest.bin >= 0:
                    self._end_idle(oldest, now - oldest.changed, returned=False)
        self._sessions.move_to_end(session)
        return known

    def _place(self, session: str, known: _Session, bin_: int) -> None:
        """Count an idle session in a bin until it is due in the next one."""
        known.bin = bin_
        self._generation += 1
        known.generation = self._generation
        due = known.changed + float(EDGES[bin_ + 1])
        heapq.heappush(self._due, (due, known.generation, session))
        self._count(known, 1)
        if len(self._due) > 2 * len(self._sessions) + SLACK:
            self._due = [each for each in self._due if self._is_current(each)]
            heapq.heapify(self._due)

    def _is_current(self, due: tuple[float, int, str]) -> bool:
        known = self._sessions.get(due[2])
        return known is not None and known.bin >= 0 and known.generation == due[1]

    def _count(self, known: _Session, sign: int) -> None:
        cell = known.group, known.bin
        self._idle[cell] += sign
        self._starts[cell] += sign * known.changed
        self._tokens[cell] += sign * known.tokens
        if self._idle[cell] == 0:
            self._starts[cell] = 0.0

    def _end_idle(self, known: _Session, idle_s: float, returned: bool) -> None:
        self._count(known, -1)
        last = min(bin_of(idle_s), BINS - 1)
        for table in self._tables_of(known.group):
            table.passed(range(known.bin, last))
            if returned:
                table.returned(last)
            else:
                table.left(last)
        known.bin = -1
        self._learned()

    def _advance(self, now: float) -> None:
        """Move sessions that have become idle for longer, and forget those that do not return."""
        while self._due and self._due[0][0] <= now:
            due = heapq.heappop(self._due)
            if not self._is_current(due):
                continue
            session, known = due[2], self._sessions[due[2]]
            self._count(known, -1)
            following = max(bin_of(now - known.changed), known.bin + 1)
            for table in self._tables_of(known.group):
                table.passed(range(known.bin, following))
            self._learned()
            survival = self._survival_of(known.group)
            if following == BINS or survival.ever(following) < FORGOTTEN:
                del self._sessions[session]
            else:
                self._place(session, known, following)

    def _learned(self) -> None:
        self._observed += 1
        self._refresh(REFRESH)

    def _refresh(self, after: int) -> None:
        """Have survival computed again, after at least so many observations."""
        if self._observed >= after:
            self._observed = 0
            self._survival = [None] * len(self._tables)

    def _tables_of(self, group: int) -> Iterable[HazardTable]:
        return self._tables[group], self._wider[group // CLASSES]

    def _survival_of(self, group: int) -> Survival:
        survival = self._survival[group]
        if survival is None:
            wider = self._wider[group // CLASSES].hazards()
            survival = self._survival[group] = Survival(self._tables[group].hazards(wider))
        return survival


def _pace_class(log_pace: float) -> int:
    """The class of a session by the logarithm of its pace; the last one without any idle time."""
    if math.isnan(log_pace):
        return CLASSES - 1
    return sum(log_pace > math.log(bound) for bound in PACES_S)
