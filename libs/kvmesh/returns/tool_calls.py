"""Tools that sessions run, as harnesses report them, and what they say about the return."""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from math import inf, isfinite, log1p
from typing import NamedTuple

from kvmesh.bus.messages import ToolEvent, session_owner
from kvmesh.returns.rates import AGE_ENDS, BINS

MAX_SESSIONS = 16384
MAX_CALLS = 64  # of one session
MAX_KNOWN = 65536  # calls of all sessions
TURNAROUND_S = 1.0  # from the end of a tool to the next prompt
SHAPE = 4.0


class _Call(NamedTuple):
    reported: float
    end: float


class _OwnedCalls:
    """Calls of one tenant's sessions, `known` in all; the latest session is the last one."""

    __slots__ = ("known", "sessions")

    def __init__(self) -> None:
        self.known = 0
        self.sessions: OrderedDict[str, OrderedDict[str, _Call]] = OrderedDict()


class ReportedTools:
    """The latest tools of each session, and when each ends. Times are Unix times.

    `known` are the calls of all sessions. Beyond MAX_SESSIONS or MAX_KNOWN, the tenant with the
    most calls loses those of its oldest session.
    """

    def __init__(self) -> None:
        self._owned: dict[str, _OwnedCalls] = {}
        self.known = self._sessions = 0

    def apply(self, event: ToolEvent) -> None:
        """Apply a report: an unknown end is infinite, that of an ended tool has passed."""
        owner = session_owner(event.session)
        owned = self._owned.get(owner)
        if owned is None:
            owned = self._owned[owner] = _OwnedCalls()
        calls = owned.sessions.get(event.session)
        if calls is None:
            calls = owned.sessions[event.session] = OrderedDict()
            self._sessions += 1
        owned.sessions.move_to_end(event.session)
        known = calls.get(event.call)
        if event.event == "ended":
            end = event.time
        elif event.remaining_s is not None and isfinite(event.remaining_s):
            end = event.time + max(event.remaining_s, 0.0)
        elif event.event == "progress" and known is not None:
            end = known.end
        else:
            end = inf
        calls[event.call] = _Call(event.time, end)
        if known is None and len(calls) > MAX_CALLS:
            calls.popitem(last=False)
        elif known is None:
            owned.known += 1
            self.known += 1
        while self.known > MAX_KNOWN or self._sessions > MAX_SESSIONS:
            self._drop_most()

    def _drop_most(self) -> None:
        most = max(self._owned, key=lambda owner: self._owned[owner].known)
        owned = self._owned[most]
        dropped = len(owned.sessions.popitem(last=False)[1])
        owned.known -= dropped
        self.known -= dropped
        self._sessions -= 1
        if not owned.sessions:
            del self._owned[most]

    def end(self, session: str, since: float) -> float | None:
        """The end of the last of the tools reported since this time; None if unknown."""
        owned = self._owned.get(session_owner(session))
        calls = owned.sessions.get(session) if owned is not None else None
        ends = [call.end for call in calls.values() if call.reported >= since] if calls else []
        end = max(ends, default=inf)
        return None if end == inf else end


def due_rates(remaining_s: float) -> list[float]:
    """Rates per second by bin of age, of a prompt that is due in about so many seconds.

    The time to the return is log-logistic: half of the prompts are back after the remaining time
    and a turnaround, and a share of 1 / (1 + 2⁴) takes twice as long.
    """
    median = max(remaining_s, 0.0) + TURNAROUND_S
    rates, start, before = [], 0.0, 0.0
    for bin_ in range(BINS):
        end = min(AGE_ENDS[bin_], 2.0 * AGE_ENDS[BINS - 2])
        hazard = log1p((end / median) ** SHAPE)
        rates.append((hazard - before) / (end - start))
        start, before = end, hazard
    return rates


def at_most_learned(rates: Sequence[float], learned: Sequence[float], age_s: float) -> list[float]:
    """Rates by age from now on, of which none exceeds the learned rate at any time in its bin.

    The learned rates are by the age of the prompt, which is `age_s` now.
    """
    found, start = [], age_s
    for bin_ in range(BINS):
        end = age_s + AGE_ENDS[bin_]
        first, last = bisect_right(AGE_ENDS, start), bisect_left(AGE_ENDS, end)
        found.append(min(rates[bin_], *learned[first : last + 1]))
        start = end
    return found
