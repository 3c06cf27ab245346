"""Tracing of one process: reads the settings, and shares the kept traces over the bus."""

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import KeepTraces, MessageDecoder
from kvmesh.settings.schema import TracingSettings
from kvmesh.tracing.endpoint import turned_on
from kvmesh.tracing.tail import KeepRate, TailBuffer
from kvmesh.tracing.tracer import Tracer, install

if TYPE_CHECKING:
    from kvmesh.tracing.otlp import OtlpExport

log = logging.getLogger(__name__)
CLOSE_S = 3.0
TAIL_SPANS = 20_000  # of unsampled requests until their end; bounds their memory
KEPT_PER_S = 10.0  # a burst of failures is seen in ten traces a second
MISSING = "tracing needs %s: pip install 'kvmesh[tracing]'"
_kept = MessageDecoder(KeepTraces)


class TracingUnavailable(Exception):
    """Tracing is turned on, and its packages are not installed."""


class ProcessTracing:
    """Installs the tracer of this process, until closed."""

    def __init__(self, bus: Bus, export: "OtlpExport", settings: TracingSettings) -> None:
        self._bus = bus
        self._export = export
        tail = TailBuffer(TAIL_SPANS) if settings.tail else None
        rate = KeepRate(KEPT_PER_S, monotonic())
        self._tracer = Tracer(
            export, tail, rate, settings.slow_s, self._announce, settings.client_context
        )
        self._follows = settings.tail

    async def open(self) -> None:
        if self._follows:
            await self._bus.subscribe(self._bus.subjects.traces, _kept, self._receive)
        install(self._tracer)

    async def close(self) -> None:
        """Send the spans in the queue, for a bounded time."""
        install(None)
        await asyncio.to_thread(self._export.close, CLOSE_S)

    def _announce(self, trace_id: str) -> None:
        self._bus.post(self._bus.subjects.traces, KeepTraces([trace_id]))

    def _receive(self, message: KeepTraces) -> None:
        for trace_id in message.traces:
            self._tracer.keep(trace_id)


async def open_tracing(
    bus: Bus, settings: TracingSettings, service: str, instance: str, version: str
) -> ProcessTracing | None:
    """Turn tracing on if it is configured; raises TracingUnavailable."""
    if not turned_on(settings):
        return None
    try:
        from kvmesh.tracing.otlp import OtlpExport

        export = OtlpExport(settings, service, instance, version)
    except ModuleNotFoundError as error:
        raise TracingUnavailable(MISSING % error.name) from error
    tracing = ProcessTracing(bus, export, settings)
    await tracing.open()
    return tracing
