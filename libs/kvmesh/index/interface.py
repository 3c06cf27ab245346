"""Interface of a prefix index; `kvmesh._native` implements it.

A *rank* is one data-parallel rank of one worker instance, identified by a small integer that the
caller assigns and may reuse after `clear`. A *tier* is 0 (engine), 1 (host), 2 (disk) or 3
(remote). Hash arrays are buffers of little-endian unsigned 64-bit integers, so they pass from the
wire to the core unchanged. Invalid arguments raise ValueError and change nothing.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple, Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

TIERS = 4
MAX_RANKS = 1 << 20
ROW = Struct(f"<{1 + TIERS}I")  # packed form of IndexRow


class IndexStats(NamedTuple):
    """Size of an index: distinct blocks, (rank, tier, block) entries, and bytes held."""

    blocks: int
    entries: int
    bytes: int


class IndexRow(NamedTuple):
    """Blocks of one rank per tier, as `find` and `ranks` return them in packed form.

    In an `OverlapReply`, `rank` is the index into its ranks.
    """

    rank: int
    engine: int
    host: int
    disk: int
    remote: int

    @property
    def tiers(self) -> tuple[int, ...]:
        return self[1:]


def unpack_rows(rows: Buffer) -> Iterator[IndexRow]:
    """Yield packed rows; raises struct.error unless they are whole."""
    return map(IndexRow._make, ROW.iter_unpack(rows))


class OverlapSegment(NamedTuple):
    """A chain of blocks that one rank holds in one tier, as returned by `dump`.

    `previous` is the salt if the chain starts a prompt (`root`), else the sequence hash of the
    preceding block, which the rank may no longer hold.
    """

    tier: int
    root: bool
    previous: int
    engine: bytes
    local: bytes


class PrefixIndex(Protocol):
    """Longest-prefix match over the blocks that ranks hold.

    A block has two hashes: the engine's opaque hash, unique within one (rank, tier) and used only
    to identify parents and removed blocks; and the mesh's sequence hash, which the index derives by
    chaining local hashes from the parent's sequence hash (from `salt` if there is no parent).

    Thread safety: `find` and `find_batch` never wait for a writer and release the GIL; calls that
    change one rank must be in order, calls for different ranks may run in parallel.
    """

    def store(
        self, rank: int, tier: int, parent: int | None, engine: Buffer, local: Buffer, salt: int = 0
    ) -> bool:
        """Add consecutive blocks after `parent` (an engine hash). Storing a held block is a no-op.

        `parent` is looked up in `tier`, then in the rank's other tiers from the engine downwards.
        Returns False and changes nothing if the rank does not hold it: the caller has missed an
        event. `salt` is used only if `parent` is None.
        """
        ...

    def attach(self, rank: int, tier: int, previous: int, engine: Buffer, local: Buffer) -> None:
        """Add consecutive blocks after the block with sequence hash `previous`, held or not."""
        ...

    def load(self, rank: int, segments: list[OverlapSegment]) -> None:
        """Add the blocks that `dump` returned: store roots, attach other segments."""
        ...

    def remove(self, rank: int, tier: int, engine: Buffer) -> bytes:
        """Drop blocks by engine hash, in any order; returns the sequence hashes of those held."""
        ...

    def clear(self, rank: int, tier: int | None = None) -> int:
        """Drop all blocks of a rank, in one tier or in all; returns their number."""
        ...

    def find(self, sequence: Buffer) -> bytes:
        """Match one prompt, given by its sequence hashes, first block first.

        Returns packed `IndexRow`s in no particular order: the rank, then for each tier the number
        of leading blocks that it adds to the tiers before it. With U(t) the union of the rank's
        blocks in tiers 0..t, tiers 0..t together add the length of the longest prefix within U(t).
        Ranks without a match are left out.
        """
        ...

    def find_batch(self, sequences: list[Buffer]) -> list[bytes]:
        """Match several prompts in one call of the native core."""
        ...

    def dump(self, rank: int) -> list[OverlapSegment]:
        """Return all blocks of a rank; `load` restores them."""
        ...

    def ranks(self) -> bytes:
        """Return packed `IndexRow`s: the rank, then the number of its blocks in each tier.

        Ranks without blocks are left out.
        """
        ...

    def stats(self) -> IndexStats: ...
