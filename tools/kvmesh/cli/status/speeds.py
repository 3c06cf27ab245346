"""The measured speeds of the ranks, as a router reports them."""

import asyncio
from collections.abc import Iterable

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import routable
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Instance, MessageDecoder, RankSpeed, Role, ShowSpeeds, SpeedReport

TIMEOUT_S = 1.0
ROUTERS = 3
_reports = MessageDecoder(SpeedReport)


async def rank_speeds(bus: Bus, cards: Iterable[Instance]) -> dict[str, dict[int, RankSpeed]]:
    """Speeds by instance and rank, of the oldest routers that reply; empty if none may be asked.

    Each router measures all ranks. An older router has measured for longer.
    """
    routers = [card for card in cards if card.role is Role.ROUTER and routable(card)]
    asked = sorted(routers, key=lambda card: card.started)[:ROUTERS]
    reports = await asyncio.gather(*(_ask(bus, card.instance) for card in asked))
    found: dict[str, dict[int, RankSpeed]] = {}
    for report in reports:
        for speed in report.ranks:
            found.setdefault(speed.instance, {}).setdefault(speed.rank, speed)
    return found


async def _ask(bus: Bus, router: str) -> SpeedReport:
    """One router's report; an empty one if it does not reply or this user may not ask."""
    try:
        return await bus.request(bus.subjects.ask(router), ShowSpeeds(), _reports, TIMEOUT_S)
    except (BusError, msgspec.MsgspecError):
        return SpeedReport([])
