"""Tells observers the phase of a worker that starts, since it has no card before it serves."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Starting

INTERVAL_S = 1.0
ENGINE, MODEL_FILES, JOINING = "engine", "model files", "joining"


class StartReport:
    """Publishes the phase when it changes, and every INTERVAL_S seconds."""

    def __init__(self, bus: Bus, instance: str, model: str, engine: str) -> None:
        self._bus = bus
        self._last = Starting(
            instance=instance,
            model=model,
            engine=engine,
            phase=ENGINE,
            since=time.time(),
            started=time.time(),
        )

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        last = self._last
        self._last = Starting(
            instance=last.instance,
            model=last.model,
            engine=last.engine,
            phase=phase,
            since=time.time(),
            started=last.started,
        )
        self._post()

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Publish within the block."""
        repeating = asyncio.create_task(self._repeat(), name="start report")
        try:
            yield
        finally:
            repeating.cancel()

    async def _repeat(self) -> None:
        while True:
            self._post()
            await asyncio.sleep(INTERVAL_S)

    def _post(self) -> None:
        self._bus.post(self._bus.subjects.starting(self._last.instance), self._last)
