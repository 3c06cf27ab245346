"""Tells observers the phases of a worker that starts, since it has no card before it serves."""

import asyncio
import time
from typing import Self

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Starting, StartPhase
from kvmesh.tracing.names import ENGINE, INSTANCE, MODEL, START, start_span
from kvmesh.tracing.tracer import kept
from kvmesh.worker.start.timeline import StartTimeline

INTERVAL_S = 1.0


class StartReport:
    """Publishes the phases when they change, and every INTERVAL_S seconds, until closed.

    While `paused`, it publishes nothing: something else tells observers of the worker.

    At its end it records them as the spans of one trace.
    """

    def __init__(
        self, bus: Bus, instance: str, model: str, engine: str, timeline: StartTimeline
    ) -> None:
        self.timeline = timeline
        self._bus = bus
        self._instance = instance
        self._model = model
        self._engine = engine
        self._shift = time.time() - time.monotonic()  # from the monotonic clock to Unix time
        self._last = (str(StartPhase.CONFIGURATION), time.monotonic())
        self._closed = False
        self.paused = False
        self._loop = asyncio.get_running_loop()
        self._repeating = asyncio.create_task(self._repeat(), name="start report")
        timeline.on_change = self._changed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("" if kind is None else kind.__name__)

    def close(self, error: str = "") -> None:
        """The start has ended, or failed with an `error` of that name; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self.timeline.on_change = lambda: None
        self._repeating.cancel()
        self._record(error)

    def _changed(self) -> None:
        """In any thread."""
        self._loop.call_soon_threadsafe(self._post_changed)

    def _post_changed(self) -> None:
        if not self._closed and self.timeline.present() not in (None, self._last):
            self._post()

    async def _repeat(self) -> None:
        while True:
            self._post()
            await asyncio.sleep(INTERVAL_S)

    def _post(self) -> None:
        if self.paused:
            return
        phase, since = self._last = self.timeline.present() or self._last
        message = Starting(
            instance=self._instance,
            model=self._model,
            engine=self._engine,
            phase=phase,
            since=since + self._shift,
            started=self.timeline.created + self._shift,
            phases=self.timeline.row(),
        )
        self._bus.post(self._bus.subjects.starting(self._instance), message)

    def _record(self, error: str) -> None:
        span = kept(START, self.timeline.created)
        if not span:
            return
        of_worker = ((INSTANCE, self._instance), (MODEL, self._model), (ENGINE, self._engine))
        for key, value in of_worker:
            span.set(key, value)
        for phase, began, ended in self.timeline.stretches():
            span.record(start_span(phase), began, ended)
        if error:
            span.fail(error)
        span.end()
