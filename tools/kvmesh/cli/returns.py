"""`kvmesh plan learned returns`: prints the returns that a router has learned."""

import asyncio
from collections.abc import Iterable, Iterator
from math import inf

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.errors import BusError, NotPermitted
from kvmesh.bus.messages import (
    ActiveAgentsReport,
    Instance,
    MessageDecoder,
    ReturnCheck,
    ReturnClass,
    ReturnsReport,
    Role,
    ShowReturns,
)
from kvmesh.cli.units import literal
from kvmesh.observer.decision_text import time_text
from kvmesh.observer.pauses import wait_text
from kvmesh.observer.returns import median_s
from kvmesh.returns.rates import BINS, share_returned, unpack_rates
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings
from kvmesh.terminal.tables import FittedTable, columns

TIMEOUT_S = 2.0
ROUTERS = 3
MOST_RESTING = 20  # shown
WITHIN = {"10 s": 10.0, "1 min": 60.0, "10 min": 600.0, "1 h": 3600.0}
_reports = MessageDecoder(ReturnsReport)


async def learned_returns(bus: Bus, settings: Settings) -> ReturnsReport | None:
    """The report of the router that has learned most, of the oldest ones; None if none replies.

    Every router learns from all requests. Raises NotPermitted if this user may not ask.
    """
    directory = Directory(bus, stream_limits(settings.streams), role=Role.ROUTER)
    await directory.open()
    routers = sorted(filter(routable, directory.instances), key=lambda card: card.started)
    await directory.close()
    asked = await asyncio.gather(*(_ask(bus, card) for card in routers[:ROUTERS]))
    reports = [report for report in asked if report is not None]
    if not reports:
        return None
    best = max(reports, key=lambda report: sum(each.prompts for each in report.classes))
    agents = [_united(each, reports) for each in best.agents]
    return msgspec.structs.replace(best, agents=agents)


def _united(agents: ActiveAgentsReport, reports: list[ReturnsReport]) -> ActiveAgentsReport:
    """A model's agents with those that rest at any of the routers."""
    same = (each for report in reports for each in report.agents if each.model == agents.model)
    resting = [agent for each in same for agent in each.resting]
    resting.sort(key=lambda agent: -agent.rested_s)
    return msgspec.structs.replace(agents, resting=resting)


async def _ask(bus: Bus, router: Instance) -> ReturnsReport | None:
    """One router's report; None if it does not reply, as an older one."""
    subject = bus.subjects.ask(router.instance)
    try:
        return await bus.request(subject, ShowReturns(), _reports, TIMEOUT_S)
    except NotPermitted:
        raise
    except (BusError, msgspec.MsgspecError):
        return None


def shares_text(each: ReturnClass, within_s: Iterable[float]) -> list[str]:
    """The shares of a class's prompts that return within these times."""
    rates = unpack_rates(each.rates)
    return [f"{100 * share_returned(rates, bound):.0f} %" for bound in within_s]


def check_lines(checks: Iterable[ReturnCheck]) -> Iterator[str]:
    """A line for each comparison of forecast and observed returns."""
    for each in checks:
        yield (
            f"{each.model}: forecasts expected {each.expected:,.1f} returns within"
            f" {each.within_s:g} s, {each.observed:,.1f} were observed"
        )


def agent_lines(agents: Iterable[ActiveAgentsReport]) -> Iterator[str]:
    """A line for each model's agents, and one for each agent that rests."""
    for each in agents:
        limit = "no limit" if each.window is None else f"{100 * each.window:.0f} % of the memory"
        yield (
            f"{each.model}: {each.active:,} agents active, {len(each.resting):,} rest; {limit} for"
            f" contexts; {100 * each.lost_share:.1f} % of prompts were lost between turns"
        )
        for agent in each.resting[:MOST_RESTING]:
            owner = f" of {agent.owner}" if agent.owner else ""
            yield (
                f"  {agent.session}{owner} rests for {agent.rested_s:.1f} s,"
                f" {agent.ends_in_s:.1f} s more at most; {agent.tokens:,} tokens"
            )


def render(classes: Iterable[ReturnClass]) -> FittedTable:
    """A row for each class, coarse ones first."""
    figures = ("prompts", "returned", "expected", *WITHIN, "half after")
    hide = ("expected", "1 h", "10 s", "10 min", "returned", "1 min", "prompts", "half after")
    table = FittedTable(columns("model", "waits for", *figures, numbers=figures, hide=hide))
    for each in sorted(classes, key=lambda each: (each.model, each.waits)):
        if len(each.rates) != BINS:
            continue  # of another version
        half = median_s(unpack_rates(each.rates))
        table.add_row(
            literal(each.model),
            literal(wait_text(each.waits) if each.waits else "anything"),
            f"{each.prompts:,.1f}",
            f"{each.returned:,.1f}",
            f"{each.expected:,.1f}",
            *shares_text(each, WITHIN.values()),
            "–" if half == inf else time_text(half),
        )
    return table
