from kvmesh.index.factory import create_index
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
    "create_index",
]
