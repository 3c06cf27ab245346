"""Tier 3: blocks that every node can read, in a store that outlives them all."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

NOTE_LENGTH_BYTES = 4
MOST_NOTE_BYTES = 1 << 16


class RemoteError(Exception):
    """The store did not do it; `operation` is the method that failed, `reason` its cause."""

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation = operation
        self.reason = reason


class RemoteBlock(Struct, frozen=True):
    """One block to be kept: its content, and a `note` (< 64 KiB) that comes back with it."""

    digest: bytes
    note: bytes
    content: memoryview


class RemoteStore(Protocol):
    """A store of immutable blocks by digest. Every method raises RemoteError, in bounded time.

    A block is there until its lease ends: `lease_s` after it was put or last found. The store may
    drop it earlier when it is full.
    """

    async def find(self, digests: Sequence[bytes]) -> int:
        """How many leading ones are there; their leases begin anew."""
        ...

    async def put(self, blocks: Sequence[RemoteBlock]) -> None:
        """Keep these blocks; one that is there already is left as it is."""
        ...

    async def get(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bytes | None]:
        """Fill each buffer with its block; returns its note, None where it is not there.

        A block of another size than its buffer counts as not there.
        """
        ...

    async def drop(self, digests: Sequence[bytes]) -> None:
        """Keep these no longer; those that are not there do not matter."""
        ...

    async def tend(self) -> None:
        """Housekeeping, to be called now and then."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads; nothing follows."""
        ...
