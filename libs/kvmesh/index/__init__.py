"""The prefix index: its interface, and the constructor of the native one."""

from kvmesh._native import NativePrefixIndex
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


def create_index() -> PrefixIndex:
    """Return an empty prefix index."""
    return NativePrefixIndex()
