from kvmesh.index.factory import create_index
from kvmesh.index.interface import (
    MAX_RANKS,
    TIERS,
    Buffer,
    IndexStats,
    OverlapSegment,
    PrefixIndex,
)

__all__ = [
    "MAX_RANKS",
    "TIERS",
    "Buffer",
    "IndexStats",
    "OverlapSegment",
    "PrefixIndex",
    "create_index",
]
