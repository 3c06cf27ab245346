"""Changes of an engine's cache, in one form for all engines."""

from typing import TypeAlias

from msgspec import Struct

HASH_MASK = (1 << 64) - 1
_TIERS = (
    {"GPU", "CUDA", "NPU", "XPU", "HPU", "TPU", "DEVICE", "HBM", "VRAM", ""},
    {"CPU", "CPU_PINNED", "CPU_TIER1", "LOCAL_CPU", "HOST", "HOST_PINNED", "DRAM", "RAM", "MEMORY"},
    {"CPU_TIER2", "DISK", "LOCAL_DISK", "NVME", "SSD", "STORAGE", "FS", "FILE"},
)


class BlocksStored(Struct, frozen=True):
    """Consecutive blocks now held after `parent`; `tokens` is packed uint32, `block_size` per hash.

    Without tokens the engine names blocks by their hashes alone. `salt` is the mesh's, if the
    engine's event carries it; `adapter` is a LoRA adapter's name. `extras` has one number per
    block: that of further keys which the engine mixes into its hash, 0 for none. `source` is the
    store of a lower tier that holds the blocks, of which an engine may have several in one tier.
    """

    hashes: list[int]
    parent: int | None
    tokens: bytes
    block_size: int
    tier: int = 0
    salt: int | None = None
    adapter: str | None = None
    extras: tuple[int, ...] = ()
    source: str = ""


class BlocksRemoved(Struct, frozen=True):
    """Blocks no longer held in `tier` (None: in any); reason and request are as in `Removed`."""

    hashes: list[int]
    tier: int | None = 0
    reason: str | None = None
    request: str | None = None
    source: str = ""


class AllCleared(Struct, frozen=True):
    """All blocks of `tier` (None: of every tier) are gone, or `maybe`: the engine does not say."""

    tier: int | None = None
    maybe: bool = False


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
    name = (
        ("" if medium is None else medium).upper().replace("-", "_").partition(":")[0]
    )  # without a device's number
    return next((tier for tier, names in enumerate(_TIERS) if name in names), len(_TIERS))
