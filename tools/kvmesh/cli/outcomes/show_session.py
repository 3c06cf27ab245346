"""`kvmesh explain --session`: a session's turns, its pauses and what was expected of them."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import inf

import msgspec
from msgspec.structs import replace
from rich.text import Text

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotPermitted
from kvmesh.bus.messages import (
    CacheAccount,
    Decision,
    MessageDecoder,
    Outcome,
    ReturnClass,
    RouteEvent,
)
from kvmesh.cli.arguments import failed
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.returns import learned_returns
from kvmesh.cli.units import literal, literal_lines
from kvmesh.frontend.namespaces import own_name
from kvmesh.observer.cache_text import lost_for
from kvmesh.observer.decision_text import forecast_text, moved, time_text
from kvmesh.observer.pauses import UNKNOWN, pauses_after, wait_text
from kvmesh.observer.returns import (
    WITHIN,
    expected_rates,
    finest_class,
    median_s,
)
from kvmesh.observer.route_stream import each_message
from kvmesh.observer.session_turns import SessionTurns
from kvmesh.returns.rates import BINS, share_returned, unpack_rates
from kvmesh.settings import Settings
from kvmesh.terminal.console import stdout_console
from kvmesh.terminal.tables import FittedTable, columns

_routes: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)


def show_session(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print them. Return the exit status."""

    async def main(bus: Bus) -> int:
        turns = SessionTurns(arguments.session, arguments.limit)
        name = arguments.session.encode()

        def on_message(data: bytes) -> None:
            if name in data:
                try:
                    turns.follow(_routes.decode(data))
                except msgspec.MsgspecError:
                    return  # of another version

        await each_message(bus, arguments.since, on_message)
        if not turns.count:
            return failed("explain", f"no request of session {arguments.session}")
        if arguments.json:
            for outcome in turns.turns:
                origin = own_name(outcome.forked_from)
                shown = replace(outcome, session=own_name(outcome.session), forked_from=origin)
                print(msgspec.json.encode(shown).decode())
            return 0
        classes = await _learned(bus, settings)
        console = stdout_console()
        render(turns.turns, classes, turns.continued).show(console)
        console.print(Text(), literal_lines(turns.summary()), sep="\n")
        return 0

    return run_on_bus("explain", settings, main)


async def _learned(bus: Bus, settings: Settings) -> list[ReturnClass]:
    """The learned returns; none if no router replies or this user may not ask."""
    try:
        report = await learned_returns(bus, settings)
    except NotPermitted:
        return []
    return [] if report is None else report.classes


def render(
    turns: Iterable[Outcome],
    classes: Sequence[ReturnClass] = (),
    continued: Mapping[str, Decision] | None = None,
) -> FittedTable:
    """A row for each turn, the oldest first, with the pause after it and what was expected of it.

    `continued` are the decisions about the turns after each, as in `SessionTurns`. Of another turn,
    the shares of such pauses that end within WITHIN are those learned by now, in `classes`.
    """
    shown = list(turns)
    several = len({outcome.conversation for outcome in shown}) > 1
    counts = ("prompt", "reused", "lost", "new", "first token")
    within = [f"in {bound}" for bound in WITHIN]
    returns = ("returns after", *within, "half in")
    forecast, waits = "forecast", "then waits for"
    table = FittedTable(
        columns(
            *("request", *(["conversation"] if several else []), "ended", *counts),
            *("worker", "lost for", waits, *returns, forecast),
            numbers=(*counts, *returns),
            hide=(
                *(forecast, *reversed(within), "half in", "new", "returns after", waits, "worker"),
                *("ended", "first token", "conversation", "reused", "prompt"),
            ),
            wraps=("lost for", waits, forecast),
        )
    )
    for outcome, pause in zip(shown, pauses_after(shown), strict=True):
        account, ttft = outcome.cache, outcome.ttft_s
        following = (continued or {}).get(outcome.request)
        table.add_row(
            outcome.request,
            *([literal(outcome.conversation)] if several else []),
            f"{datetime.fromtimestamp(outcome.time).astimezone():%H:%M:%S}",
            f"{outcome.prompt_tokens:,}",
            *_counts(account),
            "–" if ttft is None else f"{ttft * 1000:,.0f} ms",
            outcome.instance,
            literal(lost_for(account)),
            literal(wait_text(outcome.waits_for)),
            UNKNOWN if pause is None else time_text(pause),
            *(_learned_now(outcome, classes) if following is None else _expected(following)),
        )
    return table


def _expected(following: Decision) -> list[str | Text]:
    """The return that was expected of a turn, by the decision about the next one."""
    expected = following.expected
    if expected is None:
        return [UNKNOWN] * (len(WITHIN) + 2)
    by = forecast_text(expected, moved(expected, following))
    return [*_shares(expected_rates(expected)), literal(by)]


def _learned_now(outcome: Outcome, classes: Sequence[ReturnClass]) -> list[str | Text]:
    """The return that routers would expect of such a turn now."""
    of_model = (each for each in classes if each.model == outcome.model)
    found = finest_class(of_model, outcome.waits_for)
    known = found is not None and len(found.rates) == BINS
    rates = unpack_rates(found.rates) if found is not None and known else None
    return [*(f"~{text}" if rates else text for text in _shares(rates)), UNKNOWN]


def _shares(rates: Sequence[float] | None) -> list[str]:
    """The shares that return within WITHIN, and the time within which half do."""
    if rates is None:
        return [UNKNOWN] * (len(WITHIN) + 1)
    half = median_s(rates)
    shares = [f"{100 * share_returned(rates, bound):.0f} %" for bound in WITHIN.values()]
    return [*shares, UNKNOWN if half == inf else time_text(half)]


def _counts(account: CacheAccount | None) -> list[str]:
    if account is None:
        return ["–"] * 3
    return [f"{count:,}" for count in (account.reused, account.lost, account.new)]
