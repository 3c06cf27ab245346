"""What a prefix index must do; `reference` is the plain statement, `kvmesh._native` the fast one.

Vocabulary: a *rank* is one data-parallel rank of one worker instance, named by a small integer
that the caller assigns and may reuse after `clear`; a *tier* is 0 (engine), 1 (host), 2 (disk) or
3 (remote). Hash arrays are buffers of little-endian unsigned 64-bit integers, so they pass from
the wire to the core as they are. Bad arguments raise ValueError and change nothing.
"""

from typing import NamedTuple, Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

TIERS = 4
MAX_RANKS = 1 << 20


class IndexStats(NamedTuple):
    """Size of an index: distinct blocks, (rank, tier, block) entries, and bytes held."""

    blocks: int
    entries: int
    bytes: int


class OverlapSegment(NamedTuple):
    """A chain of blocks that one rank holds in one tier, as `dump` gives it.

    `previous` is the salt where the chain starts a prompt (`root`), else the sequence hash of the
    block before, which the rank may no longer hold.
    """

    tier: int
    root: bool
    previous: int
    engine: bytes
    local: bytes


class PrefixIndex(Protocol):
    """Longest-prefix match over the blocks that ranks hold.

    A block has two identities: the engine's opaque hash, unique within one (rank, tier) and used
    only to name parents and removals; and the mesh's sequence hash, which the index derives by
    chaining local hashes from the parent's sequence hash (from `salt` where there is no parent).

    Thread-safety: `find` and `find_batch` never wait for a writer and release the GIL; calls that
    change one rank must come in order, calls for different ranks may run in parallel.
    """

    def store(
        self, rank: int, tier: int, parent: int | None, engine: Buffer, local: Buffer, salt: int = 0
    ) -> bool:
        """Add consecutive blocks after `parent` (an engine hash). Storing a held block is a no-op.

        `parent` is sought in `tier`, then in the rank's other tiers from the engine downwards.
        Returns False, and changes nothing, when the rank holds it nowhere: the caller has missed
        an event. `salt` counts only where `parent` is None.
        """
        ...

    def attach(self, rank: int, tier: int, previous: int, engine: Buffer, local: Buffer) -> None:
        """Add consecutive blocks after the block with sequence hash `previous`, held or not.

        This is how a dumped `OverlapSegment` that is not a root returns.
        """
        ...

    def remove(self, rank: int, tier: int, engine: Buffer) -> int:
        """Drop blocks by engine hash, in any order; returns how many were held."""
        ...

    def clear(self, rank: int, tier: int | None = None) -> int:
        """Drop all that a rank holds, in one tier or in all; returns how many blocks that was."""
        ...

    def find(self, sequence: Buffer) -> bytes:
        """Match one prompt given as its sequence hashes, first block first.

        Returns rows of five little-endian uint32, in no particular order: rank, then for each
        tier the number of leading blocks that it adds beyond the tiers before it. With U(t) the
        union of what the rank holds in tiers 0..t, tiers 0..t together add the length of the
        longest prefix within U(t). Ranks that match nothing are left out.
        """
        ...

    def find_batch(self, sequences: list[Buffer]) -> list[bytes]:
        """`find` for each prompt in one crossing."""
        ...

    def dump(self, rank: int) -> list[OverlapSegment]:
        """Return all that a rank holds; storing (roots) or attaching the segments restores it."""
        ...

    def ranks(self) -> bytes:
        """Return rows of five little-endian uint32: rank, then blocks held in each tier.

        Ranks that hold nothing are left out.
        """
        ...

    def stats(self) -> IndexStats: ...
