"""Has workers change their roles: sends the commands, in the background."""

import logging
import time
from collections.abc import Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import ControlReply, MessageDecoder, Serve
from kvmesh.planner import metrics
from kvmesh.planner.core.groups.role_switches import SWITCH_S, PlannedSwitch
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
REPLY_S = 0.8 * SWITCH_S  # more than a worker takes to reply
_replies = MessageDecoder(ControlReply)


class RoleDriver:
    """Sends each switch to its worker. A failure is logged and passed to `on_failure`,
    with the instance and the Unix time.

    Its success is the worker's card, which shows the new role.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks = BackgroundTasks()

    def start(
        self, model: str, name: str, switch: PlannedSwitch, on_failure: Callable[[str, float], None]
    ) -> None:
        """Ask a worker, called `name`, to serve the role of another pool."""
        self._tasks.start(self._send(model, name, switch, on_failure), f"role of {name}")

    async def close(self) -> None:
        await self._tasks.close()

    async def _send(
        self, model: str, name: str, switch: PlannedSwitch, on_failure: Callable[[str, float], None]
    ) -> None:
        reason = ""
        try:
            subject = self._bus.subjects.ctl(switch.instance)
            reply = await self._bus.request(subject, Serve(switch.serves), _replies, REPLY_S)
            reason = "" if reply.ok else reply.reason or "it refuses"
        except BusError as error:
            reason = cause(error)
        result = "failed" if reason else "done"
        metrics.role_switches.labels(model, switch.target, result).inc()
        if reason:
            log.warning("%s does not serve %s: %s", name, switch.serves, reason)
            on_failure(switch.instance, time.time())
        else:
            log.info("%s serves %s", name, switch.serves)
