"""The prefix index: interface, plain Python reference, and constructor of the native one."""

from kvmesh.index.factory import create_index
from kvmesh.index.interface import (
    MAX_RANKS,
    TIERS,
    Buffer,
    IndexRow,
    IndexStats,
    OverlapSegment,
    PrefixIndex,
    unpack_rows,
)

__all__ = [
    "MAX_RANKS",
    "TIERS",
    "Buffer",
    "IndexRow",
    "IndexStats",
    "OverlapSegment",
    "PrefixIndex",
    "create_index",
    "unpack_rows",
]
