"""Detects dead frontends, whose requests need no more tokens."""

import asyncio
import logging
from collections.abc import Callable

from kvmesh.bus.absence import GONE_S
from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import BusError, NoResponder
from kvmesh.bus.messages import ControlReply, Instance, MessageDecoder, Role, StepOutput
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
_replies = MessageDecoder(ControlReply)
CHECK_S = 1.0
PROBE_S = GONE_S + 0.5


class OrphanedRequests:
    """Calls `abandon` for each dead frontend among the `active_frontends`.

    A frontend is dead when its lease has ended and no process subscribes to its tokens any more.
    One that is stopping withdraws its lease and stays subscribed.
    """

    def __init__(
        self,
        bus: Bus,
        limits: StreamLimits,
        instance: str,
        active_frontends: Callable[[], set[str]],
        abandon: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._active_frontends = active_frontends
        self._abandon = abandon
        self._left: set[str] = set()
        self._any_left = asyncio.Event()
        self._directory = Directory(bus, limits, self._on_joined, self._on_left, Role.FRONTEND)
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._directory.open()
        self._task = asyncio.create_task(self._run(), name="orphans")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._directory.close()

    def _on_joined(self, card: Instance) -> None:
        self._left.discard(card.instance)

    def _on_left(self, card: Instance) -> None:
        self._left.add(card.instance)
        self._any_left.set()

    async def _run(self) -> None:
        while True:
            if not self._left:
                self._any_left.clear()
                await self._any_left.wait()
            await next_tick(CHECK_S)
            active = self._active_frontends()
            self._left &= active
            for frontend in list(self._left):
                await self._probe(frontend)

    async def _probe(self, frontend: str) -> None:
        if not await self._is_subscribed(frontend) and frontend in self._left:
            self._left.remove(frontend)
            log.warning("frontend %s is gone: aborting its requests", frontend)
            self._abandon(frontend)

    async def _is_subscribed(self, frontend: str) -> bool:
        """True if the server has a subscriber for the frontend's tokens; none ever replies."""
        empty = StepOutput(self._instance, [])
        try:
            subject = self._bus.subjects.out(frontend)
            await self._bus.request(subject, empty, _replies, PROBE_S)
        except NoResponder:
            return False
        except BusError:
            return True
        return True
