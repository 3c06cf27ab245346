"""Commands on a worker's control subject."""

from collections.abc import Callable

from kvmesh.bus.client import Reply
from kvmesh.bus.messages import (
    AdapterCommand,
    Cancel,
    Control,
    ControlReply,
    Drain,
    LoadAdapter,
    Promote,
    Resend,
    Serve,
    ShowEvents,
    Sleep,
    TakeAdapter,
    UnloadAdapter,
)
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.worker.capabilities import (
    EngineCommand,
    event_report,
    execute_command,
)
from kvmesh.worker.engine import Engine
from kvmesh.worker.lora.manager import AdapterManager
from kvmesh.worker.requests.handler import RequestHandler
from kvmesh.worker.roles import RoleSwitch

MAX_COMMANDS = 256
MAX_TAKES = 64


class ControlHandler:
    """Executes commands on requests, adapters, the role, the engine called `name`, and drains it.

    `on_drain` is called by `Drain`; `on_sleep` by `Sleep`, and returns the reason if the worker
    refuses. A worker that `is_leaving` loads no adapters for routers. An engine may take seconds
    for a command; other commands are executed meanwhile.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        requests: RequestHandler,
        adapters: AdapterManager,
        roles: RoleSwitch,
        on_drain: Callable[[], None],
        on_sleep: Callable[[], str],
        is_leaving: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._name = name
        self._requests = requests
        self._adapters = adapters
        self._roles = roles
        self._on_drain = on_drain
        self._on_sleep = on_sleep
        self._is_leaving = is_leaving
        self._tasks = BackgroundTasks()
        self._takes = BackgroundTasks()

    def handle(self, command: Control, reply: Reply) -> None:
        """Execute a command and reply, at once or when the engine has executed it."""
        match command:
            case Cancel(request):
                reply(_request_reply(self._requests.abort(request)))
            case Resend(request, offset):
                reply(_request_reply(self._requests.resend(request, offset)))
            case Drain():
                self._on_drain()
                reply(ControlReply(True))
            case Sleep():
                reason = self._on_sleep()
                reply(ControlReply(not reason, reason))
            case Promote():
                reply(ControlReply(False, "it is not parked"))
            case ShowEvents():
                reply(event_report(self._engine))
            case _ if len(self._tasks) >= MAX_COMMANDS:
                reply(ControlReply(False, "the engine is busy with other commands"))
            case LoadAdapter() | UnloadAdapter():
                self._tasks.start(self._adapt(command, reply), "adapter command")
            case Serve():
                self._tasks.start(self._switch_role(command, reply), "role command")
            case _:
                self._tasks.start(self._execute(command, reply), "engine command")

    def take(self, command: TakeAdapter, reply: Reply) -> None:
        """Load an adapter that a router wants, and reply."""
        if self._is_leaving():
            reply(ControlReply(False, "it is leaving"))
        elif len(self._takes) >= MAX_TAKES:
            reply(ControlReply(False, "it loads many other adapters"))
        else:
            self._takes.start(self._adapt(command, reply), "adapter for a router")

    async def close(self) -> None:
        """Cancel the commands in execution."""
        await self._takes.close()
        await self._tasks.close()
        await self._adapters.close()

    async def _adapt(self, command: AdapterCommand | TakeAdapter, reply: Reply) -> None:
        reply(await self._adapters.execute(command))

    async def _switch_role(self, command: Serve, reply: Reply) -> None:
        reply(await self._roles.execute(command))

    async def _execute(self, command: EngineCommand, reply: Reply) -> None:
        reply(await execute_command(self._engine, self._name, command))


def _request_reply(known: bool) -> ControlReply:
    return ControlReply(known, "" if known else "no such request here")
