"""Has workers change their state or role: sends the commands, in the background."""

import logging
from collections.abc import Callable

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import ControlReply, Drain, MessageDecoder, Promote, Serve, Sleep
from kvmesh.planner import metrics
from kvmesh.planner.actions import WorkerCommand
from kvmesh.planner.core.groups.role_switches import SWITCH_S
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
REPLY_S = 5.0
SERVE_REPLY_S = 0.8 * SWITCH_S  # more than a worker takes to reply
_COUNTERS = {
    Promote: metrics.promotions,
    Sleep: metrics.sleeps,
    Serve: metrics.role_switches,
}
_replies = MessageDecoder(ControlReply)


class WorkerCommands:
    """Sends each command once. A failure is logged and passed to `on_failure`.

    Its success is the worker's card.
    """

    def __init__(self, bus: Bus, on_failure: Callable[[WorkerCommand], None]) -> None:
        self._bus = bus
        self._on_failure = on_failure
        self._tasks = BackgroundTasks()

    def start(self, command: WorkerCommand) -> None:
        """Send a command."""
        self._tasks.start(self._execute(command), f"command to {command.name}")

    async def close(self) -> None:
        await self._tasks.close()

    async def _execute(self, command: WorkerCommand) -> None:
        reason = await self._send(command)
        if counter := _COUNTERS.get(type(command.order)):
            result = "failed" if reason else "done"
            counter.labels(command.model, command.pool, result).inc()
        if reason:
            log.warning("%s does not %s: %s", command.name, _does(command), reason)
            self._on_failure(command)
        else:
            log.info("%s is to %s, in pool %s", command.name, _does(command), command.pool)

    async def _send(self, command: WorkerCommand) -> str:
        """The reason if the worker does not execute the command."""
        subject = self._bus.subjects.ctl(command.instance)
        limit = SERVE_REPLY_S if isinstance(command.order, Serve) else REPLY_S
        try:
            reply = await self._bus.request(subject, command.order, _replies, limit)
        except BusError as error:
            return cause(error)
        return "" if reply.ok else reply.reason or "it refuses"


def _does(command: WorkerCommand) -> str:
    match command.order:
        case Promote():
            return "start"
        case Serve(serves):
            return f"serve {serves}"
        case Sleep() | Drain():
            return type(command.order).__name__.lower()
