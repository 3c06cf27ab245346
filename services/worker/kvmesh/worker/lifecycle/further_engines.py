"""Further mock engines in a worker's process: each is a worker of its own on the mesh."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Instance, ModelCard
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.runtime.warnings import Warnings
from kvmesh.settings import Settings
from kvmesh.worker.engine import EngineContext, EngineError, create_engine
from kvmesh.worker.health.membership import Membership
from kvmesh.worker.node import WorkerNode
from kvmesh.worker.requests.orphans import OrphanedRequests

STARTS = 16  # at once: each waits for replies of NATS
log = logging.getLogger(__name__)


class _Alike(Membership):
    """A card that differs from that of the process's first worker by its name alone."""

    async def admit(self, card: Instance) -> None:
        """The first worker was admitted."""

    async def recheck(self, card: Instance) -> None:
        """The first worker was compared."""

    async def run(self, lease: Callable[[], Lease | None]) -> None:
        """The first worker is compared."""


class FurtherEngines:
    """Workers `NAME-1` to `NAME-count`, which share one connection and no metrics.

    One that is drained by a command, or fails, leaves alone.
    """

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        folder: Path,
        name: str,
        count: int,
        limits: StreamLimits,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._folder = folder
        self._limits = limits
        self._drain_s = settings.worker.drain_timeout_s
        self._leaving: set[asyncio.Task[None]] = set()
        self._orphans = OrphanedRequests(bus, limits, name)
        names = [f"{name}-{index}" for index in range(1, count + 1)]
        self.nodes = {each: self._node(each) for each in names}

    def _node(self, name: str) -> WorkerNode:
        engine = create_engine(EngineContext(self._settings, self._folder))
        return WorkerNode(
            self._bus,
            engine,
            self._settings,
            self._folder,
            name,
            f"{name}-{secrets.token_hex(4)}",
            self._limits,
            partial(self._on_end, name),
            membership=_Alike(self._bus, Warnings(), self._limits.lease_s),
            orphans=self._orphans,
        )

    async def start(self, model: ModelCard | None) -> None:
        """Join the mesh with the card of the model, which is published.

        Raises the first error of `WorkerNode.start`.
        """
        places = asyncio.Semaphore(STARTS)

        async def join(node: WorkerNode) -> None:
            async with places:
                await node.start(model)

        try:
            async with asyncio.TaskGroup() as group:
                for node in self.nodes.values():
                    group.create_task(join(node))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        if self.nodes:
            log.info("%d further engines serve in this process", len(self.nodes))

    async def close(self, drain_s: float) -> None:
        """Drain all of them for `drain_s` seconds at most, and leave."""
        await asyncio.gather(*(self._leave(name, drain_s) for name in list(self.nodes)))
        if self._leaving:
            await asyncio.wait(self._leaving)

    def _on_end(self, name: str, error: EngineError | None) -> None:
        if error is not None:
            log.error("%s leaves: %s", name, error)
        task = asyncio.ensure_future(self._leave(name, 0.0 if error else self._drain_s))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, name: str, drain_s: float) -> None:
        node = self.nodes.pop(name, None)
        if node is None:
            return
        try:
            await node.drain(drain_s)
            await node.close()
        except BusError as error:
            log.warning("%s leaves without a word: %s", name, error)
