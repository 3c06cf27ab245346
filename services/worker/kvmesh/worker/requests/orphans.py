"""Frontends that are gone: nobody reads the tokens of their requests any more."""

import asyncio
import logging
from collections.abc import Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory
from kvmesh.bus.errors import BusError, NoResponder
from kvmesh.bus.messages import ControlReply, Instance, Role, StepOutput
from kvmesh.bus.streams import StreamLimits

log = logging.getLogger(__name__)
LOOK_S = 1.0
PROBE_S = 1.0
SETTLED_S = 5.0
LOOKS = 2


class OrphanedRequests:
    """Calls `abandon` for each frontend that is gone, of those that have `asked` for something.

    One is gone when its lease has ended and nobody listens for its tokens, at two looks in a row:
    a frontend that is stopping withdraws its lease and listens on, and one that has just lost the
    connection, together with this worker perhaps, comes back.
    """

    def __init__(
        self,
        bus: Bus,
        limits: StreamLimits,
        instance: str,
        asked: Callable[[], set[str]],
        abandon: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._active_frontends = asked
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
            await asyncio.sleep(LOOK_S)
            asked = self._active_frontends()
            for frontend in list(self._missed):
                if frontend in asked:
                    await self._probe(frontend)
                else:
                    self._missed.pop(frontend, None)

    async def _probe(self, frontend: str) -> None:
        deaf = self._bus.connected_for > SETTLED_S and not await self._is_subscribed(frontend)
        if frontend not in self._missed:
            return
        self._missed[frontend] = self._missed[frontend] + 1 if deaf else 0
        if self._missed[frontend] >= LOOKS:
            del self._missed[frontend]
            log.warning("frontend %s is gone: its requests are aborted", frontend)
            self._abandon(frontend)

    async def _is_subscribed(self, frontend: str) -> bool:
        """Nobody answers this, but the server says whether there is somebody to."""
        nothing = StepOutput(self._instance, [])
        try:
            subject = self._bus.subjects.out(frontend)
            await self._bus.request(subject, nothing, ControlReply, PROBE_S)
        except NoResponder:
            return False
        except (BusError, OSError):
            return True
        return True
