"""Prompt deltas in blocks: `Offer` and `Fetch` from a worker to its kvbm.

A block's digest covers all blocks before it, so the last digest of a prompt identifies the prompt,
and comparing one digest shows whether two prompts share a prefix.
"""

from bisect import bisect_left
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from msgspec.structs import replace

from kvmesh.bus.messages import Fetch, Offer
from kvmesh.hashing import DIGEST_BYTES, HASH_BYTES
from kvmesh.runtime.lru import LruCache

MIN_BLOCKS = 64
M = TypeVar("M", bound=Offer | Fetch)


class BlockHashes(NamedTuple):
    """Digests, sequence hashes and local hashes of consecutive blocks, packed."""

    digests: bytes
    sequence_hashes: bytes = b""
    local: bytes = b""

    @property
    def blocks(self) -> int:
        return len(self.digests) // DIGEST_BYTES


class StoredPrompt:
    """A prompt of at least one block."""

    def __init__(self, whole: BlockHashes) -> None:
        self.digests = bytearray(whole.digests)
        self._sequence_hashes = bytearray(whole.sequence_hashes)
        self._local = bytearray(whole.local)

    @property
    def id(self) -> bytes:
        """Its last digest."""
        return _digest(self.digests, self.blocks - 1)

    @property
    def blocks(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def followed_by(self, shared: int, rest: BlockHashes) -> BlockHashes:
        """Return its first `shared` blocks and then `rest`."""
        hashes = HASH_BYTES * shared
        return BlockHashes(
            bytes(self.digests[: DIGEST_BYTES * shared]) + rest.digests,
            bytes(self._sequence_hashes[:hashes]) + rest.sequence_hashes,
            bytes(self._local[:hashes]) + rest.local,
        )

    def extend_to(self, whole: BlockHashes) -> None:
        """Grow into `whole`, of which this prompt is a prefix."""
        self.digests += whole.digests[len(self.digests) :]
        self._sequence_hashes += whole.sequence_hashes[len(self._sequence_hashes) :]
        self._local += whole.local[len(self._local) :]


class BlockPromptCache:
    """The receiver's side: prompts by last digest, at most `max_blocks` blocks in all.

    The least recently used prompt is evicted first; prompts below MIN_BLOCKS are not stored.
    """

    def __init__(self, max_blocks: int) -> None:
        self._prompts: LruCache[bytes, StoredPrompt] = LruCache(max_blocks, _blocks_of)

    @property
    def max_blocks(self) -> int:
        return self._prompts.max_size

    @property
    def blocks(self) -> int:
        return self._prompts.size

    def complete(self, base: bytes, shared: int, rest: BlockHashes) -> BlockHashes | None:
        """Return the first `shared` blocks of `base`, then `rest`; None if they are not held."""
        if not base:
            return rest
        stored = self._prompts.peek(base)
        if stored is None or not 0 < shared <= stored.blocks:
            return None
        return stored.followed_by(shared, rest)

    def store(self, whole: BlockHashes, base: bytes = b"") -> StoredPrompt | None:
        """Store a prompt, replacing its `base` if it extends that; None if it is not stored."""
        if not MIN_BLOCKS <= whole.blocks <= self._prompts.max_size:
            return None
        stored = self._prompts.get(base)
        if stored is not None and _has_prefix(stored.digests, whole.digests):
            return stored
        if stored is not None and _has_prefix(whole.digests, stored.digests):
            self.forget(base)
            stored.extend_to(whole)
        else:
            stored = StoredPrompt(whole)
        self._prompts.put(stored.id, stored)
        return stored

    def forget(self, prompt: bytes) -> None:
        """Drop the prompt with this id."""
        self._prompts.pop(prompt)


class SentBlockPromptCache:
    """The sender's side: the prompts that a kvbm has stored, at most `max_blocks` blocks.

    It stores by the same rules as the receiver, so both hold the same prompts.
    """

    def __init__(self, max_blocks: int) -> None:
        self._prompts = BlockPromptCache(max_blocks)
        self._by_digest: WeakValueDictionary[bytes, StoredPrompt] = WeakValueDictionary()

    @property
    def blocks(self) -> int:
        return self._prompts.blocks

    def shorten(self, message: M) -> M:
        """Return `message` without the blocks that the kvbm has stored, or `message` itself."""
        base, shared = self._longest_base(message.digests)
        if not shared:
            return message
        return replace(
            message,
            digests=message.digests[DIGEST_BYTES * shared :],
            sequence_hashes=message.sequence_hashes[HASH_BYTES * shared :],
            local=message.local[HASH_BYTES * shared :],
            base=base,
            shared=shared,
        )

    def store(self, digests: bytes, base: bytes) -> None:
        """Record that the kvbm has stored a whole prompt, sent as a delta to `base`."""
        stored = self._prompts.store(BlockHashes(digests), base)
        if stored is None:
            return
        for end in _lookup_ends(stored.blocks):
            digest = _digest(stored.digests, end - 1)
            if self._by_digest.get(digest) is stored:
                break
            self._by_digest[digest] = stored

    def forget(self, base: bytes) -> None:
        """Record that the kvbm no longer has `base`."""
        self._prompts.forget(base)

    def _longest_base(self, digests: bytes) -> tuple[bytes, int]:
        """Return the prompt that shares most leading blocks, and how many those are."""
        count = len(digests) // DIGEST_BYTES
        for end in _lookup_ends(count):
            stored = self._by_digest.get(_digest(digests, end - 1))
            if stored is not None:
                most = min(count, stored.blocks)
                return stored.id, _shared_blocks(stored, digests, end, most)
        return b"", 0


def _digest(packed: bytes | bytearray, block: int) -> bytes:
    return bytes(packed[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)])


def _has_prefix(longer: bytes | bytearray, shorter: bytes | bytearray) -> bool:
    end = len(shorter)
    return longer[end - DIGEST_BYTES : end] == shorter[-DIGEST_BYTES:]


def _lookup_ends(blocks: int) -> range:
    """Prefix lengths under which a prompt is found: every MIN_BLOCKS-th block, longest first."""
    return range(blocks // MIN_BLOCKS * MIN_BLOCKS, 0, -MIN_BLOCKS)


def _shared_blocks(stored: StoredPrompt, digests: bytes, least: int, most: int) -> int:
    """Count the leading blocks that two prompts share, between `least` and `most`."""
    differing = bisect_left(
        range(least, most), True, key=lambda i: _digest(stored.digests, i) != _digest(digests, i)
    )
    return least + differing


def _blocks_of(_id: bytes, prompt: StoredPrompt) -> int:
    return prompt.blocks
