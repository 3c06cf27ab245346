"""KV events: changes of the blocks that a rank holds."""

from typing import TypeAlias

from msgspec import Struct

EVICTED = "evicted"  # the least recently used, to make space
UNLIKELY = "unlikely"  # to make space: of engines of version 0.2, which evicted by forecasts
EXPIRED = "expired"  # evicted once its retention had expired
CLIPPED = "clipped"  # evicted, as the tenant's budget did not cover its retention
RELEASED = "released"  # only an ended session used it
SUPERSEDED = "superseded"  # only a prompt used it that its session has left, or may have
CLEARED = "cleared"  # on command
CORRUPT = "corrupt"  # their content was wrong or unreadable
WORKER_GONE = "worker_gone"
REASONS = (
    *(EVICTED, UNLIKELY, EXPIRED, CLIPPED, RELEASED, SUPERSEDED, CLEARED, CORRUPT, WORKER_GONE),
)


class Stored(Struct, frozen=True, array_like=True, tag="stored"):
    """Consecutive blocks stored after `parent` (an engine hash; None at the root of a prompt).

    `engine` and `local` are engine hashes and local hashes, packed uint64, one per block; `salt`
    seeds the chain at the root. In a dump, blocks whose parent is no longer held carry the parent's
    sequence hash as `previous` instead.
    """

    tier: int
    parent: int | None
    engine: bytes
    local: bytes
    salt: int = 0
    previous: int | None = None


class Removed(Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks removed, by engine hash (packed uint64).

    `reason` is one of the above if the engine tells it; `request` is the request for whose blocks
    the memory was needed, or whose prompt superseded that of the blocks.
    """

    tier: int
    engine: bytes
    reason: str | None = None
    request: str | None = None


class Cleared(Struct, frozen=True, array_like=True, tag="cleared"):
    """All blocks of the rank removed, in `tier` or in all tiers. First event of a full dump.

    `reason` is set if the engine has lost the blocks, unset in a dump.
    """

    tier: int | None = None
    reason: str | None = None


KvEvent: TypeAlias = Stored | Removed | Cleared


class KvBatch(Struct, frozen=True, array_like=True):
    """Events of one rank, coalesced over a few milliseconds.

    Event ids are gap-free per (instance, rank): this batch holds `first` … `first + len - 1`. A
    batch whose acknowledgement was lost may arrive twice in a row; a gap means lost events.
    """

    worker: str
    instance: str
    rank: int
    first: int
    time: float
    events: list[KvEvent]
