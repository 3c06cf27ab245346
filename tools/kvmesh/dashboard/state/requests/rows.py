"""Rows and columns of requests and of a session's turns, for tables. Pure."""

from collections.abc import Iterable
from itertools import islice
from math import inf
from typing import NamedTuple

from kvmesh.bus.messages import Decision
from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.observer.cache_text import lost_for
from kvmesh.observer.columns import RowColumn, RowView, count_text, share_text
from kvmesh.observer.decision_text import clock_text, forecast_text, moved, shares_text, time_text
from kvmesh.observer.pauses import pauses, wait_text
from kvmesh.observer.prefetch_uses import base_id
from kvmesh.observer.returns import expected_rates

MOST_RUNNING = 2_000  # listed; those that began first


class RunningRow(NamedTuple):
    """A request that waits or runs. `expected` is the share of the prompt expected in caches."""

    request: str
    state: str
    age_s: float
    worker: str
    model: str
    session: str
    tenant: str
    prompt_tokens: int | None
    expected: float | None
    generated: int


class EndedRow(NamedTuple):
    """A request that has ended, or left without an outcome. Times in seconds."""

    request: str
    ended: float
    total_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    lost_tokens: int | None
    lost_for: str
    output_tokens: int
    finish: str
    worker: str
    model: str
    session: str
    tenant: str


class TurnRow(NamedTuple):
    """A turn of a session; one that runs has no account yet. `pause_s` follows it.

    `expected` says what routers expected of that pause, by the `forecast`.
    """

    request: str
    turn: int
    arrived: float
    total_s: float | None
    ttft_s: float | None
    prompt_tokens: int | None
    reused: int | None
    lost: int | None
    new: int | None
    output_tokens: int
    worker: str
    lost_for: str
    waits_for: str
    pause_s: float | None
    expected: str
    forecast: str


def running_rows(requests: Iterable[SeenRequest], now: float) -> list[RunningRow]:
    """The first MOST_RUNNING requests that run, at the Unix time `now`."""
    return [
        RunningRow(
            seen.request,
            seen.state,
            max(now - seen.arrived, 0.0),
            seen.instance,
            seen.model,
            seen.session,
            seen.tenant,
            seen.prompt_tokens or None,
            _share(seen.expected, seen.prompt_tokens),
            seen.generated,
        )
        for seen in islice(requests, MOST_RUNNING)
    ]


def ended_rows(requests: Iterable[SeenRequest]) -> list[EndedRow]:
    """The requests among these that have an outcome."""
    return [
        EndedRow(
            seen.request,
            outcome.time,
            outcome.total_s,
            outcome.ttft_s,
            seen.prompt_tokens,
            # an engine that has not counted them reports no tiers
            outcome.cached_tokens if outcome.cached_tiers or outcome.cached_tokens else None,
            outcome.cache.lost if outcome.cache is not None else None,
            lost_for(outcome.cache),
            outcome.output_tokens,
            outcome.finish,
            outcome.instance,
            seen.model,
            seen.session,
            seen.tenant,
        )
        for seen in requests
        if (outcome := seen.outcome) is not None
    ]


def turn_rows(turns: Iterable[SeenRequest]) -> list[TurnRow]:
    """A row for each turn of one session."""
    shown = list(turns)
    ends = [inf if seen.outcome is None else seen.outcome.time for seen in shown]
    after = pauses(ends, (seen.arrived for seen in shown))
    decisions = (decision for seen in shown for decision in seen.decisions)
    following = {
        base_id(decision.expected.after): decision
        for decision in decisions
        if decision.expected is not None
    }
    return [
        _turn_row(seen, pause_s, following.get(seen.request))
        for seen, pause_s in zip(shown, after, strict=True)
    ]


def _turn_row(seen: SeenRequest, pause_s: float | None, following: Decision | None) -> TurnRow:
    outcome = seen.outcome
    account = outcome.cache if outcome is not None else None
    return TurnRow(
        seen.request,
        seen.turn,
        seen.arrived,
        outcome.total_s if outcome is not None else None,
        outcome.ttft_s if outcome is not None else None,
        seen.prompt_tokens or None,
        account.reused if account is not None else None,
        account.lost if account is not None else None,
        account.new if account is not None else None,
        seen.generated,
        seen.instance,
        lost_for(account),
        wait_text(outcome.waits_for) if outcome is not None else "",
        pause_s,
        *_expected(following),
    )


def _expected(following: Decision | None) -> tuple[str, str]:
    """The expected return of a turn, by the decision about the next one; what it goes by."""
    if following is None or following.expected is None:
        return "", ""
    expected = following.expected
    return shares_text(expected_rates(expected)), forecast_text(
        expected, moved(expected, following)
    )


def _share(tokens: int | None, total: int) -> float | None:
    return None if tokens is None or not total else tokens / total


def _span(value: float | None) -> str:
    return "" if value is None else time_text(value)


RUNNING = RowView(
    "running requests",
    (
        RowColumn("request", "request", number=False),
        RowColumn("session", "session", number=False),
        RowColumn("state", "state", number=False),
        RowColumn("age_s", "age", lambda v: f"{v:,.1f} s"),
        RowColumn("generated", "tokens so far", count_text),
        RowColumn("prompt_tokens", "prompt", count_text),
        RowColumn("expected", "expected cached", share_text),
        RowColumn("worker", "worker", number=False),
        RowColumn("tenant", "tenant", number=False),
        RowColumn("model", "model", number=False),
    ),
    "age_s",
    True,
    ("tenant", "lost_for"),
)
ENDED = RowView(
    "ended requests",
    (
        RowColumn("request", "request", number=False),
        RowColumn("ended", "ended", clock_text),
        RowColumn("total_s", "total", _span),
        RowColumn("ttft_s", "first token", _span),
        RowColumn("prompt_tokens", "prompt", count_text),
        RowColumn("cached_tokens", "cached", count_text),
        RowColumn("lost_tokens", "lost", count_text),
        RowColumn("lost_for", "lost for", number=False, wraps=True),
        RowColumn("output_tokens", "output", count_text),
        RowColumn("finish", "finish", number=False),
        RowColumn("worker", "worker", number=False),
        RowColumn("session", "session", number=False),
        RowColumn("tenant", "tenant", number=False),
        RowColumn("model", "model", number=False),
    ),
    "ended",
    True,
    ("tenant", "lost_for"),
)
TURNS = RowView(
    "turns",
    (
        RowColumn("request", "request", number=False),
        RowColumn("turn", "turn", count_text),
        RowColumn("arrived", "arrived", clock_text),
        RowColumn("total_s", "total", _span),
        RowColumn("ttft_s", "first token", _span),
        RowColumn("prompt_tokens", "prompt", count_text),
        RowColumn("reused", "reused", count_text),
        RowColumn("lost", "lost", count_text),
        RowColumn("lost_for", "lost for", number=False, wraps=True),
        RowColumn("new", "new", count_text),
        RowColumn("output_tokens", "output", count_text),
        RowColumn("worker", "worker", number=False),
        RowColumn("waits_for", "then waits for", number=False),
        RowColumn("pause_s", "returns after", _span),
        RowColumn("expected", "expected", number=False, wraps=True),
        RowColumn("forecast", "forecast", number=False, wraps=True),
    ),
    "turn",
    True,
)
