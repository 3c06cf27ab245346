"""Frontends that are gone: nobody reads the tokens of their requests any more."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory
from kvmesh.bus.errors import BusError, NoResponder
from kvmesh.bus.messages import ControlReply, Instance, Role, StepOutput
from kvmesh.bus.streams import StreamLimits

log = logging.getLogger(__name__)
_replies = msgspec.msgpack.Decoder(ControlReply)
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
        self._asked = asked
        self._abandon = abandon
        self._left: dict[str, int] = {}
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
        self._left.pop(card.instance, None)

    def _on_left(self, card: Instance) -> None:
        self._left[card.instance] = 0

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            asked = self._asked()
            for frontend in list(self._left):
                if frontend in asked:
                    await self._look(frontend)
                else:
                    self._left.pop(frontend, None)

    async def _look(self, frontend: str) -> None:
        deaf = self._bus.connected_for > SETTLED_S and not await self._listens(frontend)
        if frontend not in self._left:
            return
        self._left[frontend] = self._left[frontend] + 1 if deaf else 0
        if self._left[frontend] >= LOOKS:
            del self._left[frontend]
            log.warning("frontend %s is gone: its requests are aborted", frontend)
            self._abandon(frontend)

    async def _listens(self, frontend: str) -> bool:
        """Nobody answers this, but the server says whether there is somebody to."""
        nothing = StepOutput(self._instance, [])
        try:
            subject = self._bus.subjects.out(frontend)
            await self._bus.request(subject, nothing, _replies, PROBE_S)
        except NoResponder:
            return False
        except BusError:
            return True
        return True
