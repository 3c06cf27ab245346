"""Checks that a worker is compatible with the others of its model, before and after joining."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from math import inf

from msgspec.structs import replace

from kvmesh.bus.absence import REJOIN_S
from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.discovery.compatibility import (
    WITNESSES,
    Compatibility,
    Statements,
    namesakes,
)
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.ping import ping
from kvmesh.bus.errors import BusError, NoResponder, cause
from kvmesh.bus.messages import Instance, Role
from kvmesh.runtime.warnings import Warnings
from kvmesh.worker.engine import EngineConfigError, EngineError

log = logging.getLogger(__name__)
CHECK_S = 30.0
CARD_S = (
    0.3  # between checks, for each card: a fleet together reads cards in proportion to its size
)
PING_S = REJOIN_S + 0.5  # a worker that starts has connected just now
SEEN_S, SEEN_POLL_S = 30.0, 0.05


class Membership:
    """Compatibility of one worker with the others of its model.

    `incompatible` is the reason why routers ignore this worker; empty if they do not.
    """

    def __init__(self, bus: Bus, warnings: Warnings, lease_s: float) -> None:
        self._bus = bus
        self._warnings = warnings
        self._interval_s = min(CHECK_S, 3 * lease_s)
        self._namesakes: set[str] = set()
        self.incompatible = ""

    async def admit(self, card: Instance) -> None:
        """Before the lease: raise EngineConfigError unless the worker fits those present."""
        reason = _misfit_reason(card, await self._others(card))
        if reason:  # they may be dead, with leases that have not lapsed yet
            reason = _misfit_reason(card, await self._alive(await self._others(card)))
        if reason:
            raise EngineConfigError(f"{reason}; {ADVICE}")

    async def recheck(self, card: Instance) -> None:
        """After the lease: return once others can read it; EngineError if they cannot in SEEN_S.

        Of two incompatible workers that joined at once, the younger leaves: EngineConfigError.
        """
        others = await self._others_and_self(card)
        if _exclusion_reason(card, others):
            reason = _exclusion_reason(card, await self._alive(others))
            if reason:
                raise EngineConfigError(f"{reason}; {ADVICE}")

    async def run(self, lease: Callable[[], Lease | None]) -> None:
        """Repeat the check periodically until cancelled."""
        pause_s = self._interval_s
        while True:
            held = lease()
            if held is not None:
                try:
                    cards = await self._read()
                    self._update_warnings(held.card, cards)
                    pause_s = max(self._interval_s, CARD_S * len(cards))
                except BusError as error:
                    log.debug("cannot read the instances on the mesh: %s", cause(error))
            await asyncio.sleep(pause_s)

    async def others_serve(self, card: Instance, adapters: Collection[str] = ()) -> bool:
        """True if others take requests of the model, and have these adapters, as far as known.

        Workers that are not compatible with the oldest one take none.
        """
        try:
            others = await self._others(card)
        except EngineError as error:
            log.warning("%s", error)
            return False
        serving = [
            c.model
            for c in _group(card, [card, *others]).fitting
            if c.name != card.name and not c.draining and c.serves == card.serves
        ]
        found = {adapter for model in serving if model is not None for adapter in model.adapters}
        return bool(serving) and found.issuperset(adapters)

    def _update_warnings(self, card: Instance, cards: list[Instance]) -> None:
        """Update the warnings; a namesake counts when seen twice.

        By then the lease of a dead instance has lapsed.
        """
        self.incompatible = _exclusion_reason(card, _of_model(card, cards))
        same_name = set(namesakes(card, cards))
        both = ", ".join(sorted(same_name & self._namesakes))
        self._namesakes = same_name
        text = (
            f"{both} is named {card.name} as {card.instance} is: the index and sessions"
            " confuse them (worker.name must differ)"
        )
        ignored = f"{self.incompatible}; routers send this worker no requests"
        self._warnings.update("misfit", {"": ignored} if self.incompatible else {})
        self._warnings.update("namesake", {both: text} if both else {})

    async def _others(self, card: Instance) -> list[Instance]:
        """The other workers of the model; one of the same name is an earlier instance."""
        return [c for c in _of_model(card, await self._present()) if c.name != card.name]

    async def _others_and_self(self, card: Instance) -> list[Instance]:
        """As `_others`, once this instance is among those present: replicas may lag behind."""
        deadline = time.monotonic() + SEEN_S
        cards = await self._present()
        while card.instance not in [other.instance for other in cards]:
            if time.monotonic() > deadline:
                raise EngineError(f"cannot read the lease of this worker in {SEEN_S:g} s")
            await asyncio.sleep(SEEN_POLL_S)
            cards = await self._present()
        return [
            c for c in _of_model(card, cards) if c.name != card.name or c.instance == card.instance
        ]

    async def _present(self) -> list[Instance]:
        try:
            return await self._read()
        except BusError as error:
            raise EngineError(f"cannot read the instances on the mesh: {cause(error)}") from error

    async def _read(self) -> list[Instance]:
        return await read_cards(self._bus, Role.WORKER, *WITNESSES)

    async def _alive(self, cards: list[Instance]) -> list[Instance]:
        found = await asyncio.gather(*(self._is_alive(card) for card in cards))
        return [card for card, alive in zip(cards, found, strict=True) if alive]

    async def _is_alive(self, card: Instance) -> bool:
        if card.role in WITNESSES:  # what they state holds
            return True
        try:
            await ping(self._bus, card.instance, PING_S)
        except NoResponder:
            return False
        except BusError:
            return True  # it may be slow
        return True


ADVICE = (
    "not joining: serve it under another name (worker.served_name), or stop all workers of"
    " the model first"
)


def _of_model(card: Instance, cards: Iterable[Instance]) -> list[Instance]:
    """The cards of the model's workers, and those whose statements say what is settled."""
    assert card.model is not None
    name = card.model.name
    return [c for c in cards if (c.model and c.model.name == name) or c.role in WITNESSES]


def _misfit_reason(card: Instance, others: list[Instance]) -> str:
    """The reason why a worker does not fit those present, regardless of age; else empty."""
    youngest = replace(card, started=inf)
    return _group(card, [*others, youngest]).misfits.get(card.instance, "")


def _exclusion_reason(card: Instance, others: list[Instance]) -> str:
    """The reason why routers ignore a worker; empty if they do not."""
    known = any(other.instance == card.instance for other in others)  # its age is the server's
    return _group(card, others if known else [*others, card]).misfits.get(card.instance, "")


def _group(card: Instance, cards: list[Instance]) -> Compatibility:
    assert card.model is not None
    group = Compatibility(Statements(cards).of(card.model.name))
    for each in cards:
        if each.model is not None:
            group.join(each)
    return group
