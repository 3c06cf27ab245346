"""Sends the orders of `AdapterLoads` to workers, and tells it how they ended."""

import logging
from collections.abc import Callable, Iterable
from time import monotonic

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import ControlReply, MessageDecoder, TakeAdapter
from kvmesh.router import metrics
from kvmesh.router.placement.adapter_loads import LATE, AdapterLoad
from kvmesh.router.placement.router import RouterCore
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
SPARE_S = 2.0  # for the reply of a worker that gives up by itself
TRIES = 2  # in which another worker is asked while a request waits
_replies = MessageDecoder(ControlReply)


class AdapterOrders:
    """The orders of one model; `ended` is called after each."""

    def __init__(self, bus: Bus, core: RouterCore, ended: Callable[[], None]) -> None:
        self._bus = bus
        self._core = core
        self._ended = ended
        self._tasks = BackgroundTasks()

    def send(self, orders: Iterable[AdapterLoad]) -> None:
        """Send orders; returns at once."""
        for order in orders:
            self._tasks.start(self._send(order), "load adapter")

    async def close(self) -> None:
        """Wait for no more replies."""
        await self._tasks.close()

    async def _send(self, order: AdapterLoad) -> None:
        settings, began = self._core.settings, monotonic()
        command = TakeAdapter(
            adapter=order.adapter,
            files=order.files,
            idle_s=settings.adapter_idle_s,
            timeout_s=max(settings.adapter_wait_s / TRIES, LATE * order.expected_s),
        )
        subject, timeout_s = (
            self._bus.subjects.adapters(order.instance),
            command.timeout_s + SPARE_S,
        )
        try:
            reply = await self._bus.request(subject, command, _replies, timeout_s)
        except (BusError, msgspec.MsgspecError) as error:
            reply = ControlReply(False, cause(error))
        now = monotonic()
        took_s = now - began
        reason = "" if reply.ok else f"{order.worker}: {reply.reason}"
        end = "loaded" if reply.ok else "no room" if reply.no_room else "failed"
        metrics.adapter_loads.labels(self._core.model, end).inc()
        if end == "loaded":
            log.info(
                "%s has loaded adapter %s, as %s: %.2f s, %.2f s expected",
                *(order.worker, order.adapter, order.cause, took_s, order.expected_s),
            )
        elif end == "failed":
            log.warning("adapter %s is not loaded: %s", order.adapter, reason)
        self._core.adapters.ended(order, reason, reply.no_room, took_s, now)
        self._ended()
