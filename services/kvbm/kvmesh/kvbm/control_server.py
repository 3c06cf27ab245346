"""Server for control commands and dump requests of the mesh."""

import logging
import time
from collections.abc import Awaitable, Callable

from kvmesh.bus.client import Reply
from kvmesh.bus.messages import (
    Clear,
    Control,
    ControlReply,
    Drain,
    Dump,
    ExpectReturns,
    MessageDecoder,
    NotCleared,
    Pin,
    Release,
    Unpin,
)
from kvmesh.kvbm.core.blocks.block import REMOTE
from kvmesh.kvbm.core.manager import Manager
from kvmesh.retention.awaited_prompts import on_clock
from kvmesh.runtime.background import BackgroundTasks

log = logging.getLogger(__name__)
CLEAR_S = 5.0
MAX_CLEARS = 64
decoder: MessageDecoder[Control] = MessageDecoder(Control)
returns_decoder = MessageDecoder(ExpectReturns)
dumps = MessageDecoder(Dump)


class ControlServer:
    """Executes commands. `dump` publishes a rank's contents, `leave` ends the process.

    `undropped` is that of `RemoteSources`. `unseen_s` is the time for which the remote store may
    have blocks that no present block manager knows.
    """

    def __init__(
        self,
        manager: Manager,
        settle: Callable[[], None],
        clock: Callable[[], float],
        dump: Callable[[int], None],
        leave: Callable[[], None],
        undropped: Callable[[float], Awaitable[int]],
        unseen_s: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._settle = settle
        self._clock = clock
        self._dump = dump
        self._leave = leave
        self._undropped = undropped
        self._unseen_s = unseen_s
        self._tasks = BackgroundTasks()

    def obey(self, command: Control, reply: Reply) -> None:
        """Execute a command, and reply once it has its effect."""
        if isinstance(command, Clear):
            if len(self._tasks) >= MAX_CLEARS:
                reply(ControlReply(False, "the block manager is busy with other clears"))
                return
            blocks = self._clear(command, self._clock())
            self._settle()
            self._tasks.start(self._confirm(command, blocks, reply), "clear of the remote tier")
            return
        answer = self._obey(command, self._clock())
        self._settle()
        reply(answer)

    async def close(self) -> None:
        await self._tasks.close()

    def _obey(self, command: Control, now: float) -> ControlReply:
        match command:
            case Release():
                return ControlReply(True, blocks=self._manager.release(command.sessions, now))
            case Pin():
                return ControlReply(True, blocks=self._manager.pin(command, now))
            case Unpin(name):
                return ControlReply(True, blocks=self._manager.unpin(name, now) or 0)
            case Drain():
                self._leave()
            case _:
                return ControlReply(False, "a kvbm runs no requests")
        return ControlReply(True)

    def expect(self, message: ExpectReturns) -> None:
        """Take forecasts of returns."""
        now = self._clock()
        self._manager.expect_returns(on_clock(message.forecasts, time.time(), now), now)
        self._settle()

    def _clear(self, command: Clear, now: float) -> int:
        blocks = self._manager.clear(command, now)
        models = command.model or ", ".join(self._manager.attachments.models) or "no model"
        scope = "everything" if command.salt is None else f"namespace {command.salt:016x}"
        tiers = ", ".join(map(str, command.tiers)) or "all"
        log.info("cleared %d blocks: %s of %s, tiers: %s", blocks, scope, models, tiers)
        return blocks

    async def _confirm(self, command: Clear, blocks: int, reply: Reply) -> None:
        """Reply once the remote store has dropped its blocks, or has not."""
        reason = ""
        if not command.tiers or REMOTE in command.tiers:
            if unseen_s := self._unseen_s():
                reason = (
                    "block managers that have left may have stored blocks there, whose leases end"
                    f" within {unseen_s:.0f} s"
                )
            if left := await self._undropped(CLEAR_S):
                reason = f"the remote store has not dropped {left} blocks yet"
        kept = [NotCleared(REMOTE, reason)] if reason else []
        reply(ControlReply(not kept, reason, blocks, not_cleared=kept))

    def dump(self, request: Dump) -> ControlReply:
        if not 0 <= request.rank < len(self._manager.attachments.models):
            return ControlReply(False, f"there is no rank {request.rank}")
        self._dump(request.rank)
        return ControlReply(True)
