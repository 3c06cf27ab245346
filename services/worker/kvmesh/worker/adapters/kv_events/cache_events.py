"""Changes of an engine's cache, in one form for all engines."""

from typing import TypeAlias

from msgspec import Struct

HASH_MASK = (1 << 64) - 1
_MEDIA = {
    "GPU": 0,
    "CPU": 1,
    "CPU_PINNED": 1,
    "CPU_TIER1": 1,
    "CPU_TIER2": 2,
    "DISK": 2,
    "NVME": 2,
    "STORAGE": 2,
}


class BlocksStored(Struct, frozen=True):
    """Consecutive blocks now held after `parent`; `tokens` is packed uint32, `block_size` per hash.

    Without tokens the engine names blocks by their hashes alone. `salt` is the mesh's, if the
    engine's event carries it; `adapter` is a LoRA adapter's name. `extras` has one number per
    block: that of further keys which the engine mixes into its hash, 0 for none.
    """

    hashes: list[int]
    parent: int | None
    tokens: bytes
    block_size: int
    tier: int = 0
    salt: int | None = None
    adapter: str | None = None
    extras: tuple[int, ...] = ()


class BlocksRemoved(Struct, frozen=True):
    """Blocks no longer held in `tier` (None: in any); reason and request are as in `Removed`."""

    hashes: list[int]
    tier: int | None = 0
    reason: str | None = None
    request: str | None = None


class AllCleared(Struct, frozen=True):
    """All blocks of `tier` (None: of every tier) are gone."""

    tier: int | None = None


class BlocksMoved(Struct, frozen=True):
    """Blocks now held in tier `to` and no longer in `tier`."""

    hashes: list[int]
    tier: int
    to: int


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksMoved | AllCleared


def fold_hash(value: int | bytes) -> int:
    """An engine's block hash as a uint64: integers modulo 2**64, digests by their last 8 bytes.

    vLLM publishes a digest or, as an integer, the same last 8 bytes; SGLang signed integers.
    """
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    return value & HASH_MASK


def medium_tier(medium: str | None) -> int:
    """The tier of a storage medium as engines name it; media outside the node are tier 3."""
    return 0 if medium is None else _MEDIA.get(medium.upper(), 3)
