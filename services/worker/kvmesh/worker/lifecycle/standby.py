"""A worker on standby: parked, short of taking its device, or asleep; until it is promoted."""

import asyncio
import logging
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

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
T = TypeVar("T")
_commands: MessageDecoder[Control] = MessageDecoder(Control)


class _StandbyCommands:
    """A worker on standby on the mesh, from `open` to `close`.

    Its card has a role of its own, so nothing that chooses workers sees it. It answers pings and
    the commands `Promote`, which sets `promoted`, and `Drain`, which sets `stopping`: the process
    ends. It has no blocks to clear.
    """

    def __init__(
        self, bus: Bus, card: Instance, limits: StreamLimits, stopping: asyncio.Event
    ) -> None:
        self._bus = bus
        self._instance = card.instance
        self._lease = Lease(bus, card, limits)
        self._stopping = stopping
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
            case Promote() if self._stopping.is_set():
                reply(ControlReply(False, "it is leaving"))
            case Promote():
                self.promoted.set()
                reply(ControlReply(True))
            case Drain():
                self._stopping.set()
                reply(ControlReply(True))
            case Clear():
                reply(ControlReply(True))  # it holds no blocks
            case _:
                reply(ControlReply(False, "it is parked"))


@dataclass(frozen=True)
class Standby:
    """Has a worker wait until it is promoted, or `stopping` is set: its process is to end."""

    bus: Bus
    limits: StreamLimits
    stopping: asyncio.Event

    async def park(self, engine: Engine, card: Instance, report: StartReport) -> bool:
        """Park `engine` and wait; True once the worker is promoted, False if it is to end.

        Raises EngineConfigError if the engine cannot be parked, EngineError if it fails, and
        BusError if the card cannot be published.
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
        return await self._wait_promoted(engine, shown, report, text)

    async def sleep(self, engine: Sleeping, card: Instance, report: StartReport) -> bool:
        """Have `engine` sleep and wait, as `park` does; `report` is that of its next start."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(SLEEP_S):
                await self.await_unless_stopping(engine.sleep())
        except TimeoutError:
            raise EngineError(f"the engine did not fall asleep within {SLEEP_S:g} s") from None
        if self.stopping.is_set():
            return False
        text = f"asleep as {card.instance}, after {time.monotonic() - began:.1f} s"
        return await self._wait_promoted(engine, replace(card, asleep=True), report, text)

    async def await_unless_stopping(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if `stopping` is set before, which cancels the work."""
        task, ending = asyncio.create_task(work), asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait([task, ending], return_when=FIRST_COMPLETED)
            return task.result() if task.done() and not self.stopping.is_set() else None
        finally:
            ending.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _wait_promoted(
        self, engine: Parkable, card: Instance, report: StartReport, text: str
    ) -> bool:
        stopping = self.stopping
        commands = _StandbyCommands(self.bus, card, self.limits, stopping)
        report.paused = True
        began = time.monotonic()
        waits: list[asyncio.Task[object]] = []
        with report.timeline.phase(StartPhase.PARKED):
            try:
                await commands.open()
                log.info("%s", text)
                lost = asyncio.create_task(engine.lost())
                waits = [
                    asyncio.create_task(commands.promoted.wait()),
                    asyncio.create_task(stopping.wait()),
                    lost,
                ]
                await asyncio.wait(waits, return_when=FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()
                report.paused = False
        await commands.close()
        if lost.done() and not lost.cancelled():
            raise lost.result()
        if not commands.promoted.is_set():
            return False
        log.info("promoted after %.0f s", time.monotonic() - began)
        return True
