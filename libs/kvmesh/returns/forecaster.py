"""Forecasts of return, from the placements and ends of all requests of a model. Pure.

A turn is one request of a conversation. A later prompt that contains all full blocks of a turn's
prompt is its return; so a conversation needs no name. A turn that two prompts continue is the
shared start of several conversations: the second one begins a conversation of its own.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import compress
from math import isfinite
from typing import NamedTuple

from msgspec.structs import replace

from kvmesh.bus.messages import (
    Decision,
    ExpectedReturn,
    Hints,
    Outcome,
    ReturnForecast,
    ToolEvent,
    session_owner,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.returns.classes import MAX_WAITS, ClassNames, TurnHistory, class_keys
from kvmesh.returns.curves import Awaited, ReturnCurves
from kvmesh.returns.rates import BINS, pack_rates, share_within
from kvmesh.returns.tool_calls import ReportedTools, at_most_learned, due_rates

MAX_TURNS = 32768
MAX_RUNNING = 16384
MAX_UNSENT = 8192
MAX_EARLY = 1024  # ends that arrive before their placement, which another process publishes
NO_RETURN = pack_rates((0.0,) * BINS)  # withdraws an earlier forecast
MAX_DELAY_S = 1.0  # of a report on a tool, which nobody repeats: an older one is of a clock behind
MAX_REPORTS = 64  # on tools, that change the forecast of one turn; of progress half as many
SEEN_S = 900.0  # after its last request, a tenant's blocks have left


class SeenTenants:
    """The two latest tenants of a model's requests, by their fair class and by their sessions."""

    def __init__(self) -> None:
        self._classes: OrderedDict[str, float] = OrderedDict()
        self._owners: OrderedDict[str, float] = OrderedDict()

    def note(self, hints: Hints, now: float) -> None:
        """Note a request at the Unix time `now`."""
        _note(self._classes, hints.tenant or "", now)
        if hints.session:
            _note(self._owners, session_owner(hints.session), now)

    def several(self, now: float) -> bool:
        """True if more than one tenant has sent requests within SEEN_S."""
        since = now - SEEN_S
        for seen in (self._classes, self._owners):
            if len(seen) > 1 and next(iter(seen.values())) > since:
                return True
        return False


def _note(seen: OrderedDict[str, float], name: str, now: float) -> None:
    seen[name] = now
    seen.move_to_end(name)
    if len(seen) > 2:
        seen.popitem(last=False)


class ReturnChance(NamedTuple):
    """The probability of a return by what was learned, and by the known end of tools, if any."""

    learned: float
    reported: float | None


class Forecast(NamedTuple):
    """Packed rates of return by age since a Unix time; `by` is as in `ExpectedReturn`."""

    since: float
    rates: bytes
    by: str


@dataclass(slots=True, eq=False)
class Turn:
    """A request that was placed; `awaited` once it has ended.

    `end` is the sequence hash of the prompt's last full block. `number` counts the turns before
    this one. Once it has ended, `waits` and `agent` are those of its classes, and `forecast` the
    latest one; `sent`: a kvbm may have it.
    """

    request: str
    router: str
    placed: float
    instance: str
    rank: int
    session: str
    owner: str
    end: int
    number: int
    new_tokens: int
    pause_s: float | None
    returns: int = 0
    reports: int = 0
    waits_for_tools: bool = False
    rates: list[float] | None = None
    awaited: Awaited | None = None
    sent: bool = False
    waits: tuple[str, ...] = ()
    agent: str = ""
    forecast: Forecast | None = None


class ReturnForecaster:
    """Learns from the events of all routers; forecasts for the requests that `router` has placed.

    Times are Unix times, `now` the latest of which an event may speak. At most MAX_TURNS ended
    turns are remembered, the latest. While several tenants use the model, a report on a tool makes
    no prompt worth more than what was learned: it says only which of a tenant's prompts to give up.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self._running: OrderedDict[str, Turn] = OrderedDict()
        self._turns: OrderedDict[int, Turn] = OrderedDict()
        self._sessions: OrderedDict[str, Turn] = OrderedDict()
        self._early: OrderedDict[str, Outcome] = OrderedDict()
        self._names = ClassNames()
        self.tools = ReportedTools()
        self._tenants = SeenTenants()
        self._unsent: OrderedDict[str, tuple[Turn, ReturnForecast]] = OrderedDict()
        self.curves = ReturnCurves()

    def __len__(self) -> int:
        """The turns that are remembered, running ones included."""
        return len(self._turns) + len(self._running)

    def on_placed(self, decision: Decision, now: float) -> None:
        """A request was placed. May be called again when it is placed elsewhere."""
        size = len(decision.sequence_hashes)
        if decision.prefetch is not None or not size or size % HASH_BYTES:
            return
        now = self.curves.advance(_earlier(decision.time, now))
        known = self._running.get(decision.request)
        if known is not None:
            known.router, known.instance = decision.router, decision.chosen.instance
            known.rank = decision.chosen.rank
            return
        self._tenants.note(decision.hints, now)
        turn = self._turn(decision, now)
        self._running[turn.request] = turn
        if len(self._running) > MAX_RUNNING:
            self._running.popitem(last=False)
        early = self._early.pop(turn.request, None)
        if early is not None:
            self.on_finished(early, now)

    def _turn(self, decision: Decision, now: float) -> Turn:
        hashes = memoryview(decision.sequence_hashes).cast("Q")
        hints, end = decision.hints, hashes[-1]
        before, shared = self._continued(hashes)
        number, pause_s = 0, None
        if before is not None and before.awaited is not None:
            first = not before.returns
            before.returns += 1
            waited_s = max(0.0, decision.wait_s) + max(0.0, decision.index_s)
            self.curves.returned(before.awaited, now, waited_s)
            self._unsent.pop(before.request, None)
            if first:
                self._withdraw(before, decision, now)
                number = before.number + 1
                pause_s = max(now - waited_s - before.awaited.since, 0.0)
        return Turn(
            request=decision.request,
            router=decision.router,
            placed=now,
            instance=decision.chosen.instance,
            rank=decision.chosen.rank,
            session=hints.session or "",
            owner=hints.tenant or "",
            end=end,
            number=number,
            new_tokens=max(decision.tokens - shared * (decision.block_size or 1), 0),
            pause_s=pause_s,
        )

    def _withdraw(self, turn: Turn, following: Decision, now: float) -> None:
        """Withdraw the forecast of a turn whose session goes on elsewhere: it has left its copy."""
        chosen, session = following.chosen, following.hints.session or ""
        if turn.sent and session == turn.session:
            if (chosen.instance, chosen.rank) != (turn.instance, turn.rank):
                self._send(turn, now, NO_RETURN)
            turn.sent = False

    def _continued(self, hashes: memoryview) -> tuple[Turn | None, int]:
        """The latest turn that this prompt continues, and the blocks of that turn's prompt."""
        known = map(self._turns.__contains__, hashes[::-1])
        count = next(compress(range(len(hashes), 0, -1), known), 0)
        return (self._turns[hashes[count - 1]], count) if count else (None, 0)

    def on_finished(self, outcome: Outcome, now: float) -> None:
        """A request has ended; its placement may follow."""
        if outcome.choice:
            return
        turn = self._running.pop(outcome.request, None)
        if turn is None:
            self._early[outcome.request] = outcome
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return
        now = self.curves.advance(_earlier(outcome.time, now))
        waits = tuple(self._names.known(turn.owner, n, now) for n in outcome.waits_for[:MAX_WAITS])
        agent = self._names.known(turn.owner, outcome.agent, now) if outcome.agent else ""
        history = TurnHistory(turn.number, turn.new_tokens, outcome.output_tokens, turn.pause_s)
        tables = self.curves.tables(class_keys(waits, agent, history))
        rates = self.curves.rates(tables)
        turn.awaited = self.curves.start(tables, rates, now)
        turn.waits, turn.agent = waits, agent
        self._remember(turn, now)
        turn.rates = rates
        turn.waits_for_tools = waits[:1] == ("tool",) or outcome.finish == "tool_calls"
        if turn.session:
            self._wait_for(turn)
        self._forecast(turn, rates, now)

    def on_tool(self, event: ToolEvent, now: float) -> None:
        """A harness reports a tool: it changes the forecast of its own session's prompt alone.

        A caller without end of reports cannot keep its blocks: MAX_REPORTS change a forecast.
        """
        if not event.session or not isfinite(event.time):
            return
        time = _earlier(max(event.time, now - MAX_DELAY_S), now)
        self.tools.apply(replace(event, time=time) if time != event.time else event)
        at, turn = self.curves.advance(time), self._sessions.get(event.session)
        if turn is None or not turn.waits_for_tools or turn.awaited is None or turn.awaited.over:
            return
        if turn.reports < (MAX_REPORTS // 2 if event.event == "progress" else MAX_REPORTS):
            turn.reports += self._forecast(turn, self.curves.rates(turn.awaited.tables), at)

    def returns_within(self, session: str, seconds: float, now: float) -> ReturnChance | None:
        """The probability that a session without a request is back within so many seconds.

        What was learned are the rates of its latest turn. None if unknown.
        """
        turn = self._sessions.get(session)
        if turn is None or turn.awaited is None or turn.awaited.over or turn.rates is None:
            return None
        end = self.tools.end(session, turn.placed) if turn.waits_for_tools else None
        reported = None if end is None else share_within(due_rates(end - now), 0.0, seconds)
        age_s = max(now - turn.awaited.since, 0.0)
        return ReturnChance(share_within(turn.rates, age_s, seconds), reported)

    def take_forecasts(self, now: float) -> list[tuple[str, ReturnForecast]]:
        """The forecasts to send, each with the worker instance that computed the prompt."""
        self.curves.advance(now)
        unsent, self._unsent = self._unsent, OrderedDict()
        for turn, forecast in unsent.values():
            turn.sent = forecast.rates != NO_RETURN
        return [(turn.instance, forecast) for turn, forecast in unsent.values()]

    def _remember(self, turn: Turn, now: float) -> None:
        known = self._turns.pop(turn.end, None)
        if known is not None and known.awaited is not None:
            turn.returns = known.returns
            self.curves.forget(known.awaited, now)
        self._turns[turn.end] = turn
        if len(self._turns) > MAX_TURNS:
            _, oldest = self._turns.popitem(last=False)
            if oldest.awaited is not None:
                self.curves.forget(oldest.awaited, now)

    def _wait_for(self, turn: Turn) -> None:
        self._sessions[turn.session] = turn
        self._sessions.move_to_end(turn.session)
        if len(self._sessions) > MAX_RUNNING:
            self._sessions.popitem(last=False)

    def expected_return(self, decision: Decision) -> ExpectedReturn | None:
        """The return that was expected of the turn which a prompt is the first to continue."""
        size = len(decision.sequence_hashes)
        if decision.prefetch is not None or not size or size % HASH_BYTES:
            return None
        turn, _ = self._continued(memoryview(decision.sequence_hashes).cast("Q"))
        if turn is None or turn.awaited is None or turn.forecast is None or turn.returns:
            return None
        arrived = decision.time - decision.wait_s - decision.index_s
        return ExpectedReturn(
            after=turn.request,
            instance=turn.instance,
            rank=turn.rank,
            ended=turn.awaited.since,
            pause_s=max(arrived - turn.awaited.since, 0.0),
            since=turn.forecast.since,
            rates=turn.forecast.rates,
            by=turn.forecast.by,
            waits=list(turn.waits),
            agent=turn.agent,
        )

    def _forecast(self, turn: Turn, learned: list[float], now: float) -> bool:
        """Forecast by the known end of the session's tools, else by the learned rates.

        False if there is nothing to send.
        """
        if turn.awaited is None:
            return False
        end = self.tools.end(turn.session, turn.placed) if turn.session else None
        if end is not None:
            rates = due_rates(end - now)
            if self._tenants.several(now):
                rates = at_most_learned(rates, learned, max(now - turn.awaited.since, 0.0))
            forecast = Forecast(now, pack_rates(rates), "tool")
        elif turn.forecast is not None and turn.forecast.by == "class":
            return False  # the report changes nothing
        else:
            forecast = Forecast(turn.awaited.since, pack_rates(learned), "class")
        turn.forecast = forecast
        if turn.router != self._router:
            return False
        self._send(turn, forecast.since, forecast.rates)
        return True

    def _send(self, turn: Turn, since: float, rates: bytes) -> None:
        forecast = ReturnForecast(turn.request, turn.rank, since, rates)
        self._unsent[turn.request] = turn, forecast
        if len(self._unsent) > MAX_UNSENT:
            self._unsent.popitem(last=False)


def _earlier(time: float, now: float) -> float:
    """The time of an event, but at most `now`, which also stands for an invalid time."""
    return time if time < now else now
