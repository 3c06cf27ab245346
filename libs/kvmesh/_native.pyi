"""Native core: hashes, the prefix index, engines' blocks, candidates, rates, words, a watchdog."""

from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmesh.index.interface import Buffer, PrefixIndex

def xxh3(data: Buffer, seed: int = 0) -> int:
    """XXH3-64 of `data` (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""

def block_hashes(tokens: Buffer, block_size: int, previous: int = 0) -> tuple[bytes, bytes]:
    """Hash the full blocks of a little-endian uint32 token buffer; returns (local, sequence).

    Both are packed little-endian uint64, one per block; a partial last block is left out.
    local[i] = XXH3-64(tokens of block i, seed 1337);
    sequence[i] = XXH3-64(le64(sequence[i - 1]) ‖ le64(local[i]), seed 1337), where the first
    block follows `previous`: a `salt`, or the last sequence hash of a prefix hashed before.
    Raises ValueError for a block size below 1 or a ragged buffer. Releases the GIL.
    """

def sequence_hashes(local: Buffer, previous: int = 0) -> bytes:
    """Chain local hashes into sequence hashes after `previous`, as `block_hashes` does."""

def gather(
    overlap: NDArray[np.float64],
    loads: NDArray[np.float64],
    slots: NDArray[np.int64],
    columns: Buffer,
    node_of_slot: NDArray[np.int64] | bytes,
    group_of_node: NDArray[np.int64] | bytes,
    rows: Buffer,
    places: NDArray[np.int64] | bytes,
    predicted: NDArray[np.float64] | bytes,
    shared: NDArray[np.float64],
    blocks: int,
    block_size: int,
) -> float:
    """Write overlaps and loads of the candidates `slots` for a prompt of `blocks` blocks.

    `overlap` (candidates, TIERS): the leading blocks that a tier adds to those before it. `loads`
    (3, candidates): blocks in prefill, blocks to decode with if the prompt is added, and requests.

    `columns` (5, capacity in slots) of float64: prefill tokens and active blocks as counted, the
    corrections of both, and requests. `rows` are packed `IndexRow`s; `places` maps their ranks to a
    slot, or to the number of slots plus the number of a node; 0 if unknown. `shared` is the number
    of leading blocks by slot that active requests hold; its length is the number of slots. Nodes
    are numbered from 1; those of one group of `group_of_node`, by node, read each other's blocks,
    unless the group is 0.
    `predicted`, leading blocks by slot too, may be empty, as may `node_of_slot` without nodes.
    Returns the maximum over the candidates of blocks to decode with.
    Raises ValueError if an output does not fit, IndexError for a number beyond another buffer.
    """

class WordTokens:
    """Splits ASCII text into a pre-tokenizer's words, and caches their tokens.

    `patterns` are those of `kvmesh.frontend.tokenizer.word_patterns`; each splits the words of the
    one before. The cache has 65,536 words of at most 30 characters and 6 tokens, in 4 MiB;
    `seed` hides from clients which of them share a place. Calls hold the GIL, and raise ValueError
    for text beyond ASCII.
    """

    def __init__(
        self, patterns: list[list[tuple[int, bytes, int, int, tuple[int, ...]]]], seed: int
    ) -> None: ...
    def words(self, text: str) -> list[str]:
        """The words of a text, in order."""

    def find(self, text: str) -> list[bytes | str]:
        """The words of a text, in order: packed tokens of known ones, and single unknown words."""

    def keep(self, word: str, tokens: bytes) -> None:
        """Keep the packed tokens of a word, unless it is too long."""

def NativePrefixIndex() -> PrefixIndex:  # noqa: N802 - a class
    """An empty index, whose calls release the GIL."""

def packed_tokens(raw: Buffer) -> bytes:
    """The token ids of an array in MessagePack, packed uint32; of pairs, the first of each.

    Raises ValueError for another value, and for ids that are no uint32.
    """

def folded_hashes(raw: Buffer) -> list[int]:
    """The block hashes of an array in MessagePack as uint64.

    Integers count modulo 2**64, digests by their last 8 bytes. Raises ValueError for other values.
    """

_Run: TypeAlias = tuple[int | None, bytes, bytes, int, int | None]

class EngineBlocks:
    """The blocks of an engine's cache by its own hashes, with copies by tier and positions.

    A block without a copy stays known until `recent` others have lost their last one after it.
    `counted`: a held block that is stored again has one more copy. Names and parents are engine
    hashes (uint64). A run has the fields of `Stored` after the tier. Raises ValueError for a tier
    that does not exist.
    """

    def __init__(self, recent: int, counted: bool) -> None: ...
    def held(self, tier: int) -> int:
        """The number of blocks in a tier."""

    def kept(self) -> list[int]:
        """The number of blocks that have come into each tier."""

    def copies(self, tier: int, name: int) -> int: ...
    def position(self, name: int) -> tuple[int, int] | None:
        """The sequence hashes before (at a root: the salt) and of a known block."""

    def known(self, names: list[int]) -> int:
        """The number of these blocks whose position is known."""

    def leading(self, sequence: Buffer) -> int:
        """The number of leading sequence hashes whose blocks are in the first tier."""

    def store(
        self,
        tier: int,
        names: list[int],
        parent: int | None,
        salt: int,
        tokens: Buffer,
        extras: tuple[int, ...],
    ) -> tuple[list[_Run], list[tuple[int, bytes, list[_Run]]]] | None:
        """Add a copy of each block of a chain after `parent`, or at a root, which has the `salt`.

        `tokens` is packed uint32, as many for each block; `extras` as in `BlocksStored`. Returns
        the new blocks, and the blocks of all tiers that the first tier's event has moved: tier,
        packed names, and runs that store them anew. None, without effect, if the parent is unknown.
        Raises ValueError if tokens or extras do not fit the blocks.
        """

    def hold(self, tier: int, names: list[int], again: bool = True) -> list[_Run]:
        """Add a copy of each block, if `again` of those in the tier, too; returns the new ones.

        Raises ValueError, without effect, if a block has no position.
        """

    def release(self, tier: int, names: list[int]) -> tuple[bytes, list[int]]:
        """Remove a copy of each block.

        Returns the packed names of those of which the tier has none left, and those of which it had
        none.
        """

    def clear(self, tier: int) -> None: ...
    def forget(self) -> None:
        """Forget the positions of blocks that no tier holds."""

    def dump(self) -> list[list[_Run]]:
        """Runs of all blocks by tier, the oldest first."""

class Watchdog:
    """Aborts the process (SIGABRT) after `looks` checks in a row without a tick; needs no GIL.

    Checks every `step` seconds, not counting time in which the process is stopped.
    """

    def __init__(self, step: float, looks: int) -> None: ...
    def tick(self) -> None: ...
    def stop(self) -> None: ...

def age_bin(age_s: float) -> int:
    """The bin of an age in seconds; a negative age counts as 0."""

def share_returned(rates: Sequence[float], within_s: float) -> float:
    """The share of prompts that return within this age, by rates per second of the bins of age."""

def share_within(rates: Sequence[float], age_s: float, seconds: float) -> float:
    """The share that returns within so many seconds, of the prompts that wait at an age."""

def values_by_age(rates: Sequence[float]) -> tuple[float, ...]:
    """The value in returns per second at the start of each bin, for rates of return per second."""

def chances_by_age(rates: Sequence[float]) -> tuple[float, ...]:
    """The probability of a return at all after the start of each bin, for rates per second.

    The last bin, which has no end, counts as long as all others together.
    """

def pack_rates(rates: Sequence[float]) -> bytes:
    """Rates per second, one for each bin, as `BINS` bytes; each is off by at most 4.5 %."""

def learned_rates(tables: list[LifeTable], now: float) -> list[float]:
    """Rates per second by bin of age, of the last of these tables, coarse to fine.

    Closed ones do not count. The coarsest one refines the belief that rates halve from bin to bin.
    """

def start_all(tables: list[LifeTable], now: float, expected: float) -> None:
    """A prompt of these classes has ended: it reaches the first bin, a return as `expected`."""

def grow_older(tables: list[LifeTable], bin_: int, at: float) -> None:
    """A prompt of these classes leaves a bin of age for the next one."""

class LifeTable:
    """Life table of one class of prompts: returns and seconds at risk, by age since the last use.

    The rate of return at an age is the number of returns at that age over the seconds that prompts
    have waited at that age. Prompts that still wait count with their seconds so far, so that rates
    are not biased towards early returns. Old evidence fades with a half-life.

    Times are in seconds and do not decrease by much. `prompts`, `returned` and `expected` count,
    faded, the prompts that have ended, those that returned, and the returns that were expected of
    them. Nothing has an effect once it is `closed`: prompts that wait may hold a forgotten class.
    """

    HALF_LIFE_S: ClassVar[float]

    def __init__(self, now: float) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def prompts(self) -> float: ...
    @property
    def returned(self) -> float: ...
    @property
    def expected(self) -> float: ...
    def close(self) -> None: ...
    def leave(self, bin_: int, now: float) -> None:
        """A prompt leaves a bin of age: it returns or is forgotten."""

    def count_return(self, age_s: float, until_s: float) -> None:
        """A prompt that has left its bin at the age `until_s` had returned at `age_s`.

        Its seconds after that were counted and are taken back.
        """
