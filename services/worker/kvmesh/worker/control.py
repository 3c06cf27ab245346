"""Commands on a worker's control subject."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from kvmesh.bus.client import Reply
from kvmesh.bus.errors import cause
from kvmesh.bus.messages import (
    AdapterCommand,
    Cancel,
    Control,
    ControlReply,
    Drain,
    ExpectReturns,
    LoadAdapter,
    Promote,
    Resend,
    ReturnForecast,
    Serve,
    ShowEvents,
    Sleep,
    TakeAdapter,
    UnloadAdapter,
)
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.worker.capabilities import (
    COMMAND_S,
    EngineCommand,
    Expecting,
    event_report,
    execute_command,
)
from kvmesh.worker.engine import Engine, EngineError
from kvmesh.worker.lora.manager import AdapterManager
from kvmesh.worker.requests.handler import RequestHandler
from kvmesh.worker.roles import RoleSwitch

log = logging.getLogger(__name__)
MAX_COMMANDS = 256
MAX_TAKES = 64
MAX_FORECASTS = 8192
FORECASTS = 16  # of a call: each takes up to milliseconds, in which vLLM takes no step


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
        self._forecasts = ForecastFeed(engine) if isinstance(engine, Expecting) else None

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

    def expect(self, message: ExpectReturns) -> None:
        """Pass forecasts of returns to the engine, if it orders eviction by them."""
        if self._forecasts is not None:
            self._forecasts.put(message.forecasts)

    async def close(self) -> None:
        """Cancel the commands in execution."""
        await self._takes.close()
        await self._tasks.close()
        await self._adapters.close()
        if self._forecasts is not None:
            await self._forecasts.close()

    async def _adapt(self, command: AdapterCommand | TakeAdapter, reply: Reply) -> None:
        reply(await self._adapters.execute(command))

    async def _switch_role(self, command: Serve, reply: Reply) -> None:
        reply(await self._roles.execute(command))

    async def _execute(self, command: EngineCommand, reply: Reply) -> None:
        reply(await execute_command(self._engine, self._name, command))


class ForecastFeed:
    """Passes forecasts to an engine, FORECASTS in a call and one call at a time.

    The latest MAX_FORECASTS wait. Of failures in a row the first is logged.
    """

    def __init__(self, engine: Expecting) -> None:
        self._engine = engine
        self._waiting: deque[ReturnForecast] = deque(maxlen=MAX_FORECASTS)
        self._tasks = BackgroundTasks()
        self._failing = False

    def put(self, forecasts: list[ReturnForecast]) -> None:
        """Pass on forecasts; returns at once."""
        self._waiting += forecasts
        if self._waiting and not len(self._tasks):
            self._tasks.start(self._send(), "forecasts of returns")

    async def close(self) -> None:
        """Cancel the call in execution."""
        await self._tasks.close()

    async def _send(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # between calls of an engine that waits for nothing
            size = min(FORECASTS, len(self._waiting))
            forecasts = [self._waiting.popleft() for _ in range(size)]
            try:
                async with asyncio.timeout(COMMAND_S):
                    await self._engine.expect_returns(forecasts)
            except (EngineError, TimeoutError) as error:
                if not self._failing:
                    log.warning("the engine takes no forecasts of returns: %s", cause(error))
                self._failing = True
            else:
                self._failing = False


def _request_reply(known: bool) -> ControlReply:
    return ControlReply(known, "" if known else "no such request here")
