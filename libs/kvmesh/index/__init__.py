from kvmesh.index.factory import create_index
from kvmesh.index.hashing import HASH_VERSION, block_hashes, salt, sequence_hashes
from kvmesh.index.interface import (
    MAX_RANKS,
    TIERS,
    Buffer,
    IndexStats,
    PrefixIndex,
    Segment,
)

__all__ = [
    "HASH_VERSION",
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
