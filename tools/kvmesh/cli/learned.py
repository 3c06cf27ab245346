"""`kvmesh plan learned`: asks routers and frontends for what they learned; the table."""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.errors import BusError, NotPermitted
from kvmesh.bus.messages import (
    Instance,
    LearnedReport,
    LearnerReport,
    MessageDecoder,
    Role,
    ShowLearned,
)
from kvmesh.cli.units import literal
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings
from kvmesh.terminal.tables import FittedTable, columns

TIMEOUT_S = 1.0
MOST_ASKED = 16  # of one role; routers learn the same, so one of them is shown
LEARNING = (Role.ROUTER, Role.FRONTEND)
_reports = MessageDecoder(LearnedReport)


class Learned(NamedTuple):
    """A report and the process that it comes from."""

    process: str
    report: LearnerReport


async def learned(bus: Bus, settings: Settings) -> list[Learned] | None:
    """The reports of the mesh's learners; None if no process replies.

    Raises NotPermitted if this user may not ask.
    """
    directory = Directory(bus, stream_limits(settings.streams))
    await directory.open()
    cards = directory.instances
    await directory.close()
    return await learned_of(bus, cards)


async def learned_of(bus: Bus, cards: Iterable[Instance]) -> list[Learned] | None:
    """The reports of the learners among these processes, as `learned`."""
    asked: list[Instance] = []
    for role in LEARNING:
        own = sorted((c for c in cards if c.role is role), key=lambda card: card.started)
        asked += [card for card in own if role is not Role.ROUTER or routable(card)][:MOST_ASKED]
    replies = await asyncio.gather(*(_ask(bus, card) for card in asked))
    found = [(card, reply) for card, reply in zip(asked, replies, strict=True) if reply is not None]
    if not found:
        return None
    routers = [reply for card, reply in found if card.role is Role.ROUTER]
    best = max(routers, key=_observations, default=None)
    return [
        Learned(card.name, report)
        for card, reply in found
        if card.role is not Role.ROUTER or reply is best
        for report in reply.learners
    ]


def _observations(reply: LearnedReport) -> float:
    return sum(report.observations for report in reply.learners)


async def _ask(bus: Bus, card: Instance) -> LearnedReport | None:
    """One process's report; None if it does not reply, as an older one."""
    try:
        return await bus.request(
            bus.subjects.ask(card.instance), ShowLearned(), _reports, TIMEOUT_S
        )
    except NotPermitted:
        raise
    except (BusError, msgspec.MsgspecError):
        return None


def gain_text(report: LearnerReport) -> str:
    """The gain over the fallback in percent; a dash without held-out requests."""
    return f"{100 * report.gain:+.0f} %" if report.held_out else "–"


def line(found: Iterable[Learned]) -> str:
    """One line for all learners: the gain of each, and those that are off."""
    parts = []
    for name, reports in _by_name(found).items():
        on = [report for report in reports if report.on]
        shown = max(on or reports, key=lambda report: report.held_out)
        parts.append(f"{name} {gain_text(shown) if on else 'off'}")
    return ", ".join(parts)


def _by_name(found: Iterable[Learned]) -> dict[str, list[LearnerReport]]:
    names: dict[str, list[LearnerReport]] = {}
    for each in found:
        names.setdefault(each.report.learner, []).append(each.report)
    return names


def render(found: Iterable[Learned]) -> FittedTable:
    """A row for each learner of each model."""
    figures = ("learned from", "held out", "its error", "fallback", "gain")
    reason = "measure; reason"
    table = FittedTable(
        columns(
            *("model", "learner", "about", *figures, "now", reason),
            numbers=figures,
            hide=("held out", "its error", "fallback", reason, "learned from", "about"),
            wraps=(reason,),
        )
    )
    for process, report in found:
        about = f"{report.about} ({process})" if report.about else ""
        seen = bool(report.held_out)
        table.add_row(
            literal(report.model),
            literal(report.learner),
            literal(about),
            f"{report.observations:,.0f}",
            f"{report.held_out:,.0f}",
            f"{report.own:.3g}" if seen else "–",
            literal(f"{report.fallback} {report.other:.3g}") if seen else literal(report.fallback),
            gain_text(report),
            "on" if report.on else "off",
            literal(f"{report.measure}; {report.reason}"),
        )
    return table
