"""Constructor of the prefix index that services use."""

from kvmesh._native import NativePrefixIndex
from kvmesh.index.interface import PrefixIndex


def create_index() -> PrefixIndex:
    """Return an empty prefix index."""
    return NativePrefixIndex()
