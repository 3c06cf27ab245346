"""Interface of tier 3: a store of blocks that all nodes share and that outlives them."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

NOTE_LENGTH_BYTES = 4
MAX_NOTE_BYTES = 1 << 16


class RemoteError(Exception):
    """A store operation failed: the method `operation`, for `reason`."""

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation = operation
        self.reason = reason


class RemoteBlock(Struct, frozen=True):
    """A block to store: its content, and a `note` (< 64 KiB) that `get` returns with it."""

    digest: bytes
    note: bytes
    content: memoryview


class RemoteStore(Protocol):
    """A store of immutable blocks by digest. Every method raises RemoteError, in bounded time.

    A block's lease ends `lease_s` after it was put or last found. A full store may drop blocks
    earlier.
    """

    async def find(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks in the store; renews their leases."""
        ...

    async def put(self, blocks: Sequence[RemoteBlock]) -> None:
        """Store blocks; existing ones stay unchanged."""
        ...

    async def get(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bytes | None]:
        """Fill each buffer with its block; return the notes, None for each missing block.

        A block whose size differs from its buffer counts as missing.
        """
        ...

    async def drop(self, digests: Sequence[bytes]) -> None:
        """Drop blocks; missing ones are ignored."""
        ...

    async def is_empty(self) -> bool:
        """True if the store has no block of the mesh; False if a look takes too long."""
        ...

    async def tend(self) -> None:
        """Periodic housekeeping."""
        ...

    async def close(self) -> None:
        """Close connections and threads; no call may follow."""
        ...
