"""Optional abilities of engines, and the control commands that need them.

An engine opts in by having a protocol's methods beside those of `Engine`. `execute_command` is the
only place that checks for them before a command reaches an engine.
"""

import asyncio
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from kvmesh.bus.messages import (
    Clear,
    ControlReply,
    EventReport,
    MeasureImage,
    Pin,
    Prefetch,
    PutImage,
    RankEvents,
    Release,
    Unpin,
    Work,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.worker.clearing import clear_reply
from kvmesh.worker.engine import Engine, EngineError, EngineInfo, Unsupported
from kvmesh.worker.enginecore.counters import LedgerCounts, RetentionState
from kvmesh.worker.images import ImageStore, check_measured

COMMAND_S = 10.0
EngineCommand: TypeAlias = Clear | Release | Pin | Unpin | Prefetch | MeasureImage | PutImage


class TierCounts(Struct, frozen=True, kw_only=True):
    """Blocks moved since the start; `loaded` is indexed by the tier that the blocks came from."""

    loaded: list[int]
    written: int = 0
    skipped: int = 0
    corrupt: int = 0


class HandoffCounts(Struct, frozen=True, kw_only=True):
    """Handoffs that ended since the start, by side and result, and the bytes that were fetched.

    Side and result are ("offered", "done" or "failed"), or ("fetched", the transport or "failed").
    """

    ended: dict[tuple[str, str], int]
    fetched_bytes: int = 0


@runtime_checkable
class Releasing(Protocol):
    """Engine that gives up the blocks of ended sessions."""

    async def release(self, sessions: list[str]) -> int:
        """Drop blocks that no other session and no running request uses, or evict them first.

        Returns the number of dropped blocks; ignores unknown ids. Raises Unsupported.
        """
        ...


@runtime_checkable
class Retaining(Releasing, Protocol):
    """Engine that retains blocks on request and reports the outcome of each directive.

    All calls but `retention` return the number of blocks affected. Calls take effect in order.
    """

    async def pin(self, pin: Pin) -> int:
        """Retain a prefix as a preference; a pin with the same id is replaced."""
        ...

    async def unpin(self, pin: str) -> int:
        """Remove a pin by its id."""
        ...

    def retention(self) -> list[RetentionState]:
        """Return the retention state of each rank."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """Engine that loads or computes blocks before a request needs them."""

    def prefetch(self, command: Prefetch) -> str:
        """Start a prefetch; return the reason if it is refused. `abort` with its id ends it."""
        ...


@runtime_checkable
class ReadingImages(Protocol):
    """Engine that takes work with images, the files of which it has in `images` by then."""

    images: ImageStore

    async def measure_image(self, width: int, height: int) -> int:
        """The number of tokens that an image has in a prompt.

        Raises Unsupported if the model reads no images, and EngineError whose text begins with
        "invalid: " if it reads none of this size.
        """
        ...


@runtime_checkable
class Tiered(Protocol):
    """Engine that onboards blocks from lower tiers and writes blocks through to them."""

    def tier_counts(self) -> TierCounts | None:
        """Return the blocks moved so far; None if there can be no lower tiers."""
        ...


@runtime_checkable
class FollowingEvents(Protocol):
    """Engine whose blocks are known from KV events that it publishes."""

    def event_counts(self) -> list[LedgerCounts]:
        """Return the counts of each rank whose events are followed."""
        ...


@runtime_checkable
class HandingOff(Protocol):
    """Engine that itself offers the KV of prompts to other engines and fetches theirs."""

    def handoff_counts(self) -> HandoffCounts | None:
        """Return the handoffs so far; None if it can have had none in its roles."""
        ...


@runtime_checkable
class HandingDown(Protocol):
    """Engine that stores what lower tiers lack of its blocks, before it closes."""

    async def hand_down(self, timeout_s: float) -> int:
        """Store blocks, the most valuable first; no request runs, and none follows.

        Returns the number of blocks that are not stored after `timeout_s` seconds.
        """
        ...


@runtime_checkable
class AdapterLoading(Protocol):
    """Engine that loads and unloads LoRA adapters, called by their identities, while it runs."""

    def max_adapter_rank(self) -> int:
        """The largest rank of an adapter; 0 if the engine states none."""
        ...

    async def load_adapter(self, identity: str, folder: Path) -> None:
        """Load an adapter; no effect if it is loaded. Raises AdapterError or Unsupported."""
        ...

    async def unload_adapter(self, identity: str) -> None:
        """Unload an adapter that no request uses; raises AdapterError or Unsupported."""
        ...


@runtime_checkable
class RoleSwitching(Protocol):
    """Engine that serves another role without a restart.

    Requests of all roles run side by side: those of an earlier role may still arrive.
    """

    async def switch_role(self, serves: str) -> None:
        """Get ready for requests of a role; no effect if it is. Raises Unsupported or EngineError.

        A caller that stops to wait leaves the engine as it was.
        """
        ...


@runtime_checkable
class Parkable(Protocol):
    """Engine whose start has a part that needs no device, after which it can wait.

    `start`, called after `park`, does the rest. `close` may be called instead.
    """

    async def park(self) -> None:
        """Do all that needs no device; holds no device memory and no context of a device then.

        Raises EngineError, and EngineConfigError if it cannot be parked as it is configured.
        """
        ...

    async def lost(self) -> EngineError:
        """Return once a parked engine has failed and cannot be started any more."""
        ...


@runtime_checkable
class Sleeping(Parkable, Protocol):
    """Engine that can free its device again; then it is as after `park`, and `start` wakes it."""

    def cannot_sleep(self) -> str:
        """The reason if it cannot sleep as it is configured; empty if it can."""
        ...

    async def sleep(self) -> None:
        """Free the device: KV blocks are gone, weights are in memory of the host or gone too.

        No request runs, and the earlier sink gets nothing any more. Raises EngineError, after which
        only `close` may be called.
        """
        ...


def sleep_problem(engine: Engine, name: str) -> str:
    """The reason if the engine called `name` cannot sleep; empty if it can."""
    if not isinstance(engine, Sleeping):
        return f"unsupported: the {name} engine cannot sleep"
    reason = engine.cannot_sleep()
    return f"unsupported: {reason}" if reason else ""


async def never() -> EngineError:
    """`Parkable.lost` of an engine of which nothing runs while it is parked."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def execute_command(engine: Engine, name: str, command: EngineCommand) -> ControlReply:
    """Execute a control command; the reply says `unsupported: …` if engine `name` cannot.

    A reply takes at most COMMAND_S seconds.
    """
    if isinstance(command, Pin) and len(command.sequence_hashes) % HASH_BYTES:
        size = len(command.sequence_hashes)
        return ControlReply(False, f"invalid: {size} bytes are not a list of block hashes")
    try:
        async with asyncio.timeout(COMMAND_S):
            match command:
                case Prefetch():
                    if not isinstance(engine, Prefetching):
                        raise Unsupported(f"the {name} engine cannot prefetch")
                    reason = engine.prefetch(command)
                    return ControlReply(not reason, reason)
                case Clear():
                    return clear_reply(await engine.clear(command))
                case MeasureImage(width, height):
                    check_measured(width, height)
                    tokens = await _reading_images(engine, name).measure_image(width, height)
                    return ControlReply(True, tokens=tokens)
                case PutImage():
                    _reading_images(engine, name).images.put(command)
                    return ControlReply(True)
                case Release() | Pin() | Unpin():
                    return ControlReply(True, blocks=await _retain(engine, name, command))
    except Unsupported as error:
        return ControlReply(False, f"unsupported: {error}")
    except TimeoutError:
        return ControlReply(False, f"the {name} engine did not reply within {COMMAND_S:g} s")
    except EngineError as error:
        return ControlReply(False, str(error))


def event_report(engine: Engine) -> EventReport:
    """The counts of the KV events that an engine publishes; none if it tells its blocks itself."""
    ranks = engine.event_counts() if isinstance(engine, FollowingEvents) else []
    return EventReport(
        [
            RankEvents(
                rank=counts.rank,
                kept=counts.kept,
                lost=counts.dropped,
                unplaced=counts.unplaced,
                malformed=counts.malformed,
                limits=counts.limits,
            )
            for counts in ranks
        ]
    )


def _reading_images(engine: Engine, name: str) -> ReadingImages:
    if not isinstance(engine, ReadingImages):
        raise Unsupported(f"the {name} engine takes no images")
    return engine


async def _retain(engine: Engine, name: str, command: Release | Pin | Unpin) -> int:
    if isinstance(command, Release) and isinstance(engine, Releasing):
        return await engine.release(command.sessions)
    if not isinstance(engine, Retaining) or isinstance(command, Release):
        raise Unsupported(f"the {name} engine has no control over block retention")
    match command:
        case Pin():
            return await engine.pin(command)
        case Unpin(pin):
            return await engine.unpin(pin)


def default_outcomes(work: Work, info: EngineInfo) -> tuple[list[str] | None, str | None]:
    """The outcome of each explicit directive of the prompt, and that for the output.

    Both are None for an engine that reports outcomes itself.
    """
    if info.reports_outcomes:
        return None, None
    explicit = sum(retain.explicit for retain in work.retention)
    decode = info.retention if work.decode is not None and work.decode.explicit else None
    return [info.retention] * explicit or None, decode
