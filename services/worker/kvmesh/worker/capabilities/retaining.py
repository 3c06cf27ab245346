"""What an engine does that can be told which blocks to keep, and how a worker obeys."""

from collections.abc import Container
from typing import Protocol, runtime_checkable

from kvmesh.bus.messages import Clear, ControlReply, Pin, Release, Unpin, Work
from kvmesh.hashing import HASH_BYTES
from kvmesh.worker.engine import Engine, Unsupported
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.enginecore.simulated_tiers import TIERS


@runtime_checkable
class Retaining(Protocol):
    """What an engine has besides `Engine` if it keeps blocks as asked, and tells what came of it.

    All calls return how many blocks it concerned.
    """

    def release(self, sessions: list[str]) -> int:
        """Drop what no other session and no running request uses; unknown ones are fine."""
        ...

    def pin(self, pin: Pin) -> int:
        """Prefer to keep a prefix; the same id replaces."""
        ...

    def unpin(self, pin: str) -> int:
        """Forget a pin."""
        ...

    def drop(self, salt: int | None, tenant: str, tiers: Container[int]) -> int:
        """Drop every cached block that no running request uses, of one namespace if told.

        A namespace is a salt and a tenant. `tiers` are those that are meant; not all need be the
        engine's.
        """
        ...

    def retention(self) -> list[RetentionState]:
        """The state of each rank."""
        ...


def obey(engine: Engine, name: str, command: Clear | Release | Pin | Unpin) -> ControlReply:
    """Do it, or say that this engine cannot."""
    if isinstance(command, Pin) and len(command.sequence_hashes) % HASH_BYTES:
        return ControlReply(
            False, f"invalid: {len(command.sequence_hashes)} bytes are no block hashes"
        )
    try:
        if isinstance(command, Clear):
            return ControlReply(True, blocks=_clear(engine, name, command))
        return ControlReply(True, blocks=_keep(engine, name, command))
    except Unsupported as error:
        return ControlReply(False, f"unsupported: {error}")


def _clear(engine: Engine, name: str, command: Clear) -> int:
    tiers = command.tiers or TIERS
    if isinstance(engine, Retaining):
        return engine.drop(command.salt, command.tenant, tiers)
    if 0 not in tiers:
        return 0
    if command.salt is not None:
        raise Unsupported(f"the {name} engine cannot clear one namespace only")
    engine.clear()
    return 0


def _keep(engine: Engine, name: str, command: Release | Pin | Unpin) -> int:
    if not isinstance(engine, Retaining):
        raise Unsupported(f"the {name} engine cannot be told which blocks to keep")
    match command:
        case Release():
            return engine.release(command.sessions)
        case Pin():
            return engine.pin(command)
        case Unpin(pin):
            return engine.unpin(pin)


def outcomes(engine: Engine, work: Work, otherwise: str) -> tuple[list[str] | None, str | None]:
    """What to tell of explicit directives, for an engine that does not tell itself.

    First of those for the prompt, then of that for the answer.
    """
    if isinstance(engine, Retaining):
        return None, None
    explicit = sum(retain.explicit for retain in work.retention)
    decode = otherwise if work.decode is not None and work.decode.explicit else None
    return [otherwise] * explicit or None, decode
