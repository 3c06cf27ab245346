"""Detects dead frontends, whose requests need no more tokens."""

import asyncio
import logging
from collections.abc import Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import BusError, NoResponder
from kvmesh.bus.messages import ControlReply, Instance, MessageDecoder, Role, StepOutput
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
_replies = MessageDecoder(ControlReply)
CHECK_S = 1.0
PROBE_S = 1.0
SETTLED_S = 5.0
MISSED_PROBES = 2


class OrphanedRequests:
    """Calls `abandon` for each dead frontend among the `active_frontends`.

    A frontend is dead when its lease has ended and, in two probes in a row, nothing subscribes to
    its tokens. One that is stopping withdraws its lease and stays subscribed; one that has just
    lost the connection, perhaps together with this worker, reconnects.
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
        self._missed: dict[str, int] = {}
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
        self._missed.pop(card.instance, None)

    def _on_left(self, card: Instance) -> None:
        self._missed[card.instance] = 0

    async def _run(self) -> None:
        while True:
            await next_tick(CHECK_S)
            active = self._active_frontends()
            for frontend in list(self._missed):
                if frontend in active:
                    await self._probe(frontend)
                else:
                    self._missed.pop(frontend, None)

    async def _probe(self, frontend: str) -> None:
        missed = self._bus.connected_for > SETTLED_S and not await self._is_subscribed(frontend)
        if frontend not in self._missed:
            return
        self._missed[frontend] = self._missed[frontend] + 1 if missed else 0
        if self._missed[frontend] >= MISSED_PROBES:
            del self._missed[frontend]
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
