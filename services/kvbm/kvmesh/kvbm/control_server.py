"""What the mesh asks of a kvbm: commands, and what it holds."""

import logging
from collections.abc import Callable

import msgspec

from kvmesh.bus.messages import (
    Clear,
    Control,
    ControlReply,
    Drain,
    Dump,
    Pin,
    Release,
    Unpin,
)
from kvmesh.kvbm.core.manager import Manager

log = logging.getLogger(__name__)
decoder: "msgspec.msgpack.Decoder[Control]" = msgspec.msgpack.Decoder(Control)
dumps = msgspec.msgpack.Decoder(Dump)


class ControlServer:
    """Obeys commands. `dump` publishes a rank's contents, `leave` ends the process."""

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

    def _clear(self, command: Clear, now: float) -> int:
        blocks = self._manager.clear(command, now)
        models = command.model or ", ".join(self._manager.models) or "no model"
        whose = "everything" if command.salt is None else f"namespace {command.salt:016x}"
        tiers = ", ".join(map(str, command.tiers)) or "all"
        log.info("cleared %d blocks: %s of %s, tiers: %s", blocks, whose, models, tiers)
        return blocks

    def dump(self, asked: Dump) -> ControlReply:
        if not 0 <= asked.rank < len(self._manager.models):
            return ControlReply(False, f"there is no rank {asked.rank}")
        self._dump(asked.rank)
        return ControlReply(True)


def _unpinned(blocks: int | None) -> ControlReply:
    return ControlReply(
        blocks is not None, "" if blocks is not None else "no such pin", blocks or 0
    )
