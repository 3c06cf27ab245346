"""The role of a worker, and its changes at run time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvmesh.bus.messages import ControlReply, Serve
from kvmesh.worker.capabilities import COMMAND_S, RoleSwitching
from kvmesh.worker.engine import Engine, EngineError, EngineInfo, Unsupported

log = logging.getLogger(__name__)


def role_problem(info: EngineInfo, serves: str) -> str:
    """The reason why the engine, as configured, cannot serve a role; empty if it can."""
    if serves != "aggregated" and not info.supports_handoff:
        return f"the {info.name} engine, as configured, cannot serve {serves}"
    if serves != "decode" and info.needs_handoff:
        return f"the {info.name} engine, as configured, computes no prompts: it serves decode only"
    return ""


class RoleSwitch:
    """Executes `Serve` commands on the engine, one at a time; `serves` is the role at the start.

    `publish` puts a role on the worker's card within a time of its own, and returns the reason if
    the worker cannot.
    """

    def __init__(
        self, engine: Engine, serves: str, publish: Callable[[str], Awaitable[str]]
    ) -> None:
        self._engine = engine
        self._serves = serves
        self._publish = publish
        self._info: EngineInfo | None = None
        self._lock = asyncio.Lock()

    def open(self, info: EngineInfo) -> None:
        """Accept commands from now on: the engine has started."""
        self._info = info

    async def execute(self, command: Serve) -> ControlReply:
        """Switch the role; the engine has COMMAND_S seconds to get ready."""
        try:
            async with asyncio.timeout(COMMAND_S) as limit, self._lock:
                reason = await self._prepare(command.serves)
                if not reason and command.serves != self._serves:
                    limit.reschedule(None)
                    reason = await self._switch(command.serves)
        except Unsupported as error:
            reason = f"unsupported: {error}"
        except EngineError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the engine did not get ready within {COMMAND_S:g} s"
        if reason:
            log.warning("cannot serve %s: %s", command.serves, reason)
        return ControlReply(not reason, reason)

    async def _prepare(self, serves: str) -> str:
        """Get the engine ready for a role; returns the reason if it cannot serve it."""
        engine, info = self._engine, self._info
        if info is None:
            return "the worker is starting"
        if serves == self._serves:
            return ""
        if reason := role_problem(info, serves):
            return reason
        if not isinstance(engine, RoleSwitching):
            raise Unsupported(f"the {info.name} engine changes its role only with a restart")
        await engine.switch_role(serves)
        return ""

    async def _switch(self, serves: str) -> str:
        if reason := await self._publish(serves):
            return reason
        log.info("serving %s instead of %s", serves, self._serves)
        self._serves = serves
        return ""
