"""Tracing in a process of vLLM, where a scheduler's and a worker's connector share one tracer."""

import logging

from kvmesh.bus.client import Bus
from kvmesh.runtime.service import VERSION
from kvmesh.settings.schema import TracingSettings
from kvmesh.tracing.process import ProcessTracing, TracingUnavailable, open_tracing
from kvmesh.tracing.tracer import is_installed

log = logging.getLogger(__name__)
SERVICE = "kvmesh-worker"


class SharedTracing:
    """The tracer of this process while it has users; none if a worker of the mesh has its own."""

    def __init__(self) -> None:
        self._users = 0
        self._tracing: ProcessTracing | None = None

    async def open(self, bus: Bus, settings: TracingSettings, instance: str) -> None:
        """Add a user; the first turns tracing on. Each calls `close` once."""
        self._users += 1
        if self._users > 1 or is_installed():
            return
        try:
            self._tracing = await open_tracing(bus, settings, SERVICE, instance, VERSION)
        except TracingUnavailable as error:
            log.warning("the connector records no spans: %s", error)

    async def close(self) -> None:
        """Remove a user; the last one sends the spans in the queue, for a bounded time."""
        self._users -= 1
        if not self._users and self._tracing is not None:
            tracing, self._tracing = self._tracing, None
            await tracing.close()


shared_tracing = SharedTracing()
