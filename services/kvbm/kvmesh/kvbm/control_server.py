"""Server for control commands and dump requests of the mesh."""

import logging
import time
from collections.abc import Callable

from kvmesh.bus.messages import (
    Clear,
    Control,
    ControlReply,
    Drain,
    Dump,
    ExpectReturns,
    MessageDecoder,
    Pin,
    Release,
    Unpin,
)
from kvmesh.kvbm.core.manager import Manager
from kvmesh.retention.awaited_prompts import on_clock

log = logging.getLogger(__name__)
decoder: MessageDecoder[Control] = MessageDecoder(Control)
returns_decoder = MessageDecoder(ExpectReturns)
dumps = MessageDecoder(Dump)


class ControlServer:
    """Executes commands. `dump` publishes a rank's contents, `leave` ends the process."""

    def __init__(
        self,
        manager: Manager,
        settle: Callable[[], None],
        clock: Callable[[], float],
        dump: Callable[[int], None],
        leave: Callable[[], None],
    ) -> None:
        self._manager = manager
        self._settle = settle
        self._clock = clock
        self._dump = dump
        self._leave = leave

    def obey(self, command: Control) -> ControlReply:
        reply = self._obey(command, self._clock())
        self._settle()
        return reply

    def _obey(self, command: Control, now: float) -> ControlReply:
        match command:
            case Clear():
                return ControlReply(True, blocks=self._clear(command, now))
            case Release():
                return ControlReply(True, blocks=self._manager.release(command.sessions, now))
            case Pin():
                return ControlReply(True, blocks=self._manager.pin(command, now))
            case Unpin(name):
                return _unpinned(self._manager.unpin(name, now))
            case Drain():
                self._leave()
            case _:
                return ControlReply(False, "a kvbm runs no requests")
        return ControlReply(True)

    def expect(self, message: ExpectReturns) -> None:
        """Order eviction by forecasts of returns."""
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

    def dump(self, request: Dump) -> ControlReply:
        if not 0 <= request.rank < len(self._manager.attachments.models):
            return ControlReply(False, f"there is no rank {request.rank}")
        self._dump(request.rank)
        return ControlReply(True)


def _unpinned(blocks: int | None) -> ControlReply:
    return ControlReply(
        blocks is not None, "" if blocks is not None else "no such pin", blocks or 0
    )
