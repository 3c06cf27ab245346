"""A worker that waits to be promoted: parked, short of taking its device, or asleep."""

import asyncio
import logging
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.ping import answer_pings
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import (
    Clear,
    Control,
    ControlReply,
    Drain,
    Instance,
    MessageDecoder,
    Promote,
    StartPhase,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.worker.capabilities import Parkable, Sleeping
from kvmesh.worker.engine import Engine, EngineConfigError, EngineError
from kvmesh.worker.start.report import StartReport

log = logging.getLogger(__name__)
SLEEP_S = 120.0  # hundreds of gigabytes may move to the memory of the host
_commands: MessageDecoder[Control] = MessageDecoder(Control)


class ParkingSpace:
    """A parked worker on the mesh, from `open` to `close`.

    Its card has a role of its own, so nothing that chooses workers sees it. It answers pings and
    the commands `Promote`, which sets `promoted`, and `Drain`, which calls `leave`. It has no
    blocks to clear. `leaving` says that the process ends.
    """

    def __init__(
        self,
        bus: Bus,
        card: Instance,
        limits: StreamLimits,
        leave: Callable[[], None],
        leaving: Callable[[], bool],
    ) -> None:
        self._bus = bus
        self._instance = card.instance
        self._lease = Lease(bus, card, limits)
        self._leave = leave
        self._leaving = leaving
        self._subscriptions: list[Subscription] = []
        self.promoted = asyncio.Event()

    async def open(self) -> None:
        """Publish the card; raises BusError."""
        self._subscriptions = [
            await self._bus.serve(
                self._bus.subjects.ctl(self._instance),
                _commands,
                self._execute,
                on_malformed=lambda reason: ControlReply(False, reason),
            ),
            await answer_pings(self._bus, self._instance),
        ]
        await self._lease.open()

    async def close(self) -> None:
        """Withdraw the card, and leave the commands to others."""
        await self._lease.close()
        while self._subscriptions:
            with suppress(BusError):  # a lost connection has none
                await self._subscriptions.pop().unsubscribe()

    def _execute(self, command: Control, reply: Reply) -> None:
        match command:
            case Promote() if self._leaving():
                reply(ControlReply(False, "it is leaving"))
            case Promote():
                self.promoted.set()
                reply(ControlReply(True))
            case Drain():
                self._leave()
                reply(ControlReply(True))
            case Clear():
                reply(ControlReply(True))  # it holds no blocks
            case _:
                reply(ControlReply(False, "it is parked"))


async def wait_parked(
    bus: Bus,
    engine: Engine,
    card: Instance,
    limits: StreamLimits,
    report: StartReport,
    stopping: asyncio.Event,
) -> bool:
    """Park `engine` and wait; True once it is promoted, False if the process is to end instead.

    Raises EngineConfigError if the engine cannot be parked, EngineError if it fails, and BusError
    if the card cannot be published.
    """
    if not isinstance(engine, Parkable):
        raise EngineConfigError(
            f"the {card.engine} engine cannot be parked: start it without worker.parked"
        )
    timeline = report.timeline
    with timeline.phase(StartPhase.ENGINE, outer=True):
        await engine.park()
    shown = replace(card, phases=timeline.row(), startup_s=time.monotonic() - timeline.created)
    text = f"parked as {card.instance}, after {shown.startup_s:.1f} s"
    return await _wait_promoted(bus, engine, shown, limits, report, stopping, text)


async def wait_asleep(
    bus: Bus,
    engine: Sleeping,
    card: Instance,
    limits: StreamLimits,
    report: StartReport,
    stopping: asyncio.Event,
) -> bool:
    """Have `engine` sleep and wait, as `wait_parked` does; `report` is that of its next start."""
    began = time.monotonic()
    sleeping = asyncio.create_task(engine.sleep(), name="engine falls asleep")
    ending = asyncio.create_task(stopping.wait())
    await asyncio.wait({sleeping, ending}, timeout=SLEEP_S, return_when=FIRST_COMPLETED)
    ending.cancel()
    if not sleeping.done():
        sleeping.cancel()
        await asyncio.wait([sleeping])
        if stopping.is_set():
            return False
        raise EngineError(f"the engine did not fall asleep within {SLEEP_S:g} s")
    sleeping.result()
    shown = replace(card, asleep=True)
    text = f"asleep as {card.instance}, after {time.monotonic() - began:.1f} s"
    return await _wait_promoted(bus, engine, shown, limits, report, stopping, text)


async def _wait_promoted(
    bus: Bus,
    engine: Parkable,
    card: Instance,
    limits: StreamLimits,
    report: StartReport,
    stopping: asyncio.Event,
    text: str,
) -> bool:
    space = ParkingSpace(bus, card, limits, stopping.set, stopping.is_set)
    report.paused = True
    began = time.monotonic()
    waits: list[asyncio.Task[object]] = []
    with report.timeline.phase(StartPhase.PARKED):
        try:
            await space.open()
            log.info("%s", text)
            lost = asyncio.create_task(engine.lost())
            waits = [
                asyncio.create_task(space.promoted.wait()),
                asyncio.create_task(stopping.wait()),
                lost,
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            report.paused = False
    await space.close()
    if lost.done() and not lost.cancelled():
        raise lost.result()
    if not space.promoted.is_set():
        return False
    log.info("promoted after %.0f s", time.monotonic() - began)
    return True
