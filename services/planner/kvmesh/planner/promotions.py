"""Has parked workers promoted, and ready ones sleep or drain, in the background."""

import logging
import time
from collections.abc import Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import ControlReply, Drain, MessageDecoder, Promote, Sleep
from kvmesh.planner import metrics
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
REPLY_S = 5.0
_replies = MessageDecoder(ControlReply)


class PromotionDriver:
    """Sends the commands. A failure is logged and passed on; the planner then chooses again.

    The success of a promotion is the worker's card.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks = BackgroundTasks()

    def promote(
        self, model: str, pool: str, instance: str, on_failure: Callable[[str], None]
    ) -> None:
        """Have a parked worker of `pool` promoted."""
        self._tasks.start(self._promote(model, pool, instance, on_failure), f"promote {instance}")

    def sleep(
        self, model: str, pool: str, instance: str, on_failure: Callable[[str, float], None]
    ) -> None:
        """Have a ready worker of `pool` sleep; a failure comes with the Unix time."""
        self._tasks.start(self._sleep(model, pool, instance, on_failure), f"sleep {instance}")

    def drain(self, instance: str) -> None:
        """Have a ready worker drain and end."""
        self._tasks.start(self._drain(instance), f"drain {instance}")

    async def close(self) -> None:
        await self._tasks.close()

    async def _promote(
        self, model: str, pool: str, instance: str, on_failure: Callable[[str], None]
    ) -> None:
        reason = await self._send(instance, Promote())
        metrics.promotions.labels(model, pool, "failed" if reason else "done").inc()
        if reason:
            log.warning("%s is not promoted: %s", instance, reason)
            on_failure(instance)
        else:
            log.info("%s is promoted, in pool %s", instance, pool)

    async def _sleep(
        self, model: str, pool: str, instance: str, on_failure: Callable[[str, float], None]
    ) -> None:
        reason = await self._send(instance, Sleep())
        metrics.sleeps.labels(model, pool, "failed" if reason else "done").inc()
        if reason:
            log.warning("%s does not sleep: %s", instance, reason)
            on_failure(instance, time.time())
        else:
            log.info("%s sleeps, in pool %s", instance, pool)

    async def _drain(self, instance: str) -> None:
        if reason := await self._send(instance, Drain()):
            log.warning("%s does not drain: %s", instance, reason)
        else:
            log.info("%s drains: more workers serve than are wanted", instance)

    async def _send(self, instance: str, command: Promote | Sleep | Drain) -> str:
        """The reason if the worker does not execute the command."""
        subject = self._bus.subjects.ctl(instance)
        try:
            reply = await self._bus.request(subject, command, _replies, REPLY_S)
        except BusError as error:
            return cause(error)
        return "" if reply.ok else reply.reason or "it refuses"
