"""Tools that sessions run, as harnesses report them, and what they say about the return."""

from collections import OrderedDict
from math import inf, isfinite, log1p
from typing import NamedTuple

from kvmesh.bus.messages import ToolEvent
from kvmesh.returns.rates import AGE_ENDS, BINS

MAX_SESSIONS = 16384
MAX_CALLS = 64  # of one session
MAX_KNOWN = 65536  # calls of all sessions
TURNAROUND_S = 1.0  # from the end of a tool to the next prompt
SHAPE = 4.0


class _Call(NamedTuple):
    reported: float
    end: float


class ReportedTools:
    """The latest tools of each session, and when each ends. Times are Unix times."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, OrderedDict[str, _Call]] = OrderedDict()
        self._known = 0

    def __len__(self) -> int:
        """The calls of all sessions."""
        return self._known

    def apply(self, event: ToolEvent) -> None:
        """Apply a report: an unknown end is infinite, that of an ended tool has passed."""
        calls = self._calls.setdefault(event.session, OrderedDict())
        self._calls.move_to_end(event.session)
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
        self._known += known is None
        if len(calls) > MAX_CALLS:
            calls.popitem(last=False)
            self._known -= 1
        while len(self._calls) > MAX_SESSIONS or self._known > MAX_KNOWN:
            self._known -= len(self._calls.popitem(last=False)[1])

    def end(self, session: str, since: float) -> float | None:
        """The end of the last of the tools reported since this time; None if unknown."""
        calls = self._calls.get(session)
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
