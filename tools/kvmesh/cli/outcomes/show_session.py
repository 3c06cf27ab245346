"""`kvmesh explain --session`: prints a session's turns and pauses, and its cached tokens."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotPermitted
from kvmesh.bus.messages import CacheAccount, Outcome, ReturnClass
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.returns import learned_returns, shares_text
from kvmesh.cli.units import literal, literal_lines
from kvmesh.frontend.namespaces import own_name
from kvmesh.observer.cache_text import lost_for
from kvmesh.observer.decision_text import time_text
from kvmesh.observer.pauses import UNKNOWN, pauses_after, wait_text
from kvmesh.observer.returns import finest_class
from kvmesh.observer.route_stream import each_outcome
from kvmesh.observer.session_turns import SessionTurns
from kvmesh.returns.rates import BINS
from kvmesh.settings import Settings

WIDTH = 240
FORECAST = {"1 min": 60.0, "10 min": 600.0}


def show_session(arguments: argparse.Namespace, settings: Settings) -> int:
    """Print them. Return the exit status."""

    async def main(bus: Bus) -> int:
        turns = SessionTurns(arguments.session, arguments.limit)
        await each_outcome(bus, arguments.since, turns.add)
        if not turns.count:
            print(f"kvmesh explain: no request of session {arguments.session}", file=sys.stderr)
            return 1
        if arguments.json:
            for outcome in turns.turns:
                shown = replace(outcome, session=own_name(outcome.session))
                print(msgspec.json.encode(shown).decode())
            return 0
        classes = await _learned(bus, settings)
        console = Console(highlight=False)
        wide = console if console.is_terminal else Console(highlight=False, width=WIDTH)
        wide.print(render(turns.turns, classes), Text(), literal_lines(turns.summary()), sep="\n")
        return 0

    return run_on_bus("explain", settings, main)


async def _learned(bus: Bus, settings: Settings) -> list[ReturnClass]:
    """The learned returns; none if no router replies or this user may not ask."""
    try:
        report = await learned_returns(bus, settings)
    except NotPermitted:
        return []
    return [] if report is None else report.classes


def render(turns: Iterable[Outcome], classes: Sequence[ReturnClass] = ()) -> Table:
    """A row for each turn, the oldest first, with the pause after it.

    With learned `classes`, the shares of such pauses that end within FORECAST.
    """
    shown = list(turns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("request", "ended"):
        table.add_column(heading, no_wrap=True)
    for heading in ("prompt", "reused", "lost", "new"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("first token", justify="right", no_wrap=True)
    for heading in ("worker", "lost for", "then waits for"):
        table.add_column(heading)
    table.add_column("returns after", justify="right", no_wrap=True)
    for heading in FORECAST if classes else ():
        table.add_column(f"in {heading}", justify="right", no_wrap=True)
    for outcome, pause in zip(shown, pauses_after(shown), strict=True):
        account, ttft = outcome.cache, outcome.ttft_s
        table.add_row(
            outcome.request,
            f"{datetime.fromtimestamp(outcome.time).astimezone():%H:%M:%S}",
            f"{outcome.prompt_tokens:,}",
            *_counts(account),
            "–" if ttft is None else f"{ttft * 1000:,.0f} ms",
            outcome.instance,
            literal(lost_for(account)),
            literal(wait_text(outcome.waits_for)),
            UNKNOWN if pause is None else time_text(pause),
            *(_shares(outcome, classes) if classes else ()),
        )
    return table


def _shares(outcome: Outcome, classes: Sequence[ReturnClass]) -> list[str]:
    of_model = (each for each in classes if each.model == outcome.model)
    found = finest_class(of_model, outcome.waits_for)
    if found is None or len(found.rates) != BINS:
        return [UNKNOWN] * len(FORECAST)
    return shares_text(found, FORECAST.values())


def _counts(account: CacheAccount | None) -> list[str]:
    if account is None:
        return ["–"] * 3
    return [f"{count:,}" for count in (account.reused, account.lost, account.new)]
