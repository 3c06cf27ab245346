"""Detects dead frontends, whose requests need no more tokens."""

import asyncio
import logging
from typing import Protocol

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


class FollowedRequests(Protocol):
    """The requests of one engine."""

    @property
    def frontends(self) -> set[str]:
        """The frontends of live and recently ended requests."""
        ...

    def abandon(self, frontend: str) -> None:
        """Abort and forget the requests of a frontend that is gone."""
        ...


class OrphanedRequests:
    """Has the requests of dead frontends abandoned, for all engines that share it.

    A frontend is dead when its lease has ended and no process subscribes to its tokens any more.
    One that is stopping withdraws its lease and stays subscribed.
    """

    def __init__(self, bus: Bus, limits: StreamLimits, instance: str) -> None:
        self._bus = bus
        self._limits = limits
        self._instance = instance
        self._followed: list[FollowedRequests] = []
        self._changing = asyncio.Lock()
        self._left: set[str] = set()
        self._any_left = asyncio.Event()
        self._directory: Directory | None = None
        self._task: asyncio.Task[None] | None = None

    async def follow(self, requests: FollowedRequests) -> None:
        """Watch over an engine's requests until `forget`; raises BusError."""
        async with self._changing:
            if self._directory is None:
                directory = Directory(
                    self._bus, self._limits, self._on_joined, self._on_left, Role.FRONTEND
                )
                await directory.open()
                self._directory = directory
                self._task = asyncio.create_task(self._run(), name="orphans")
            self._followed.append(requests)

    async def forget(self, requests: FollowedRequests) -> None:
        """End what `follow` began, if it did."""
        async with self._changing:
            if requests in self._followed:
                self._followed.remove(requests)
            if self._followed or self._task is None or self._directory is None:
                return
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._directory.close()
            self._directory = self._task = None

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
            self._left &= set[str]().union(*(each.frontends for each in self._followed))
            for frontend in list(self._left):
                if not await self._is_subscribed(frontend) and frontend in self._left:
                    self._left.remove(frontend)
                    log.warning("frontend %s is gone: aborting its requests", frontend)
                    for requests in list(self._followed):
                        requests.abandon(frontend)

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
