from kvmesh.index.factory import create_index
from kvmesh.index.hashing import block_hashes, salt, sequence_hashes
from kvmesh.index.interface import (
    MAX_RANKS,
    TIERS,
    Buffer,
    IndexStats,
    PrefixIndex,
    Segment,
)

__all__ = [
    "MAX_RANKS",
    "TIERS",
    "Buffer",
    "IndexStats",
    "PrefixIndex",
    "Segment",
    "block_hashes",
    "create_index",
    "salt",
    "sequence_hashes",
]
