"""Prompts that a worker has described to its kvbm, so that it sends only what follows them. Pure.

Both sides keep them by the same rules. A digest names everything before it, so a prompt is called
by its last one, and whether two begin alike is seen from a single digest.
"""

from bisect import bisect_left
from collections import OrderedDict
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from msgspec.structs import replace

from kvmesh.blocks.digests import DIGEST_BYTES
from kvmesh.bus.kvbm import Fetch, Offer

HASH_BYTES = 8
LEAST_BLOCKS = 64
M = TypeVar("M", bound=Offer | Fetch)


class Names(NamedTuple):
    """What consecutive blocks of a prompt are called; packed, as in the messages."""

    digests: bytes
    sequence_hashes: bytes = b""
    local: bytes = b""

    @property
    def blocks(self) -> int:
        return len(self.digests) // DIGEST_BYTES


class Known:
    """A prompt that is known, at least one block long."""

    def __init__(self, whole: Names) -> None:
        self.digests = bytearray(whole.digests)
        self._sequence = bytearray(whole.sequence_hashes)
        self._local = bytearray(whole.local)

    @property
    def name(self) -> bytes:
        return _digest(self.digests, self.blocks - 1)

    @property
    def blocks(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def followed_by(self, shared: int, rest: Names) -> Names:
        """Its first `shared` blocks, and then others."""
        hashes = HASH_BYTES * shared
        return Names(
            bytes(self.digests[: DIGEST_BYTES * shared]) + rest.digests,
            bytes(self._sequence[:hashes]) + rest.sequence_hashes,
            bytes(self._local[:hashes]) + rest.local,
        )

    def grow(self, whole: Names) -> None:
        """Become `whole`, which begins like it."""
        self.digests += whole.digests[len(self.digests) :]
        self._sequence += whole.sequence_hashes[len(self._sequence) :]
        self._local += whole.local[len(self._local) :]


class KnownPrompts:
    """By name, least recently used out first; `most` blocks in all. Short ones are not kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: OrderedDict[bytes, Known] = OrderedDict()
        self.blocks = 0

    def complete(self, base: bytes, shared: int, rest: Names) -> Names | None:
        """The first `shared` blocks of `base`, then `rest`; None if they are not known."""
        if not base:
            return rest
        known = self._held.get(base)
        if known is None or not 0 < shared <= known.blocks:
            return None
        return known.followed_by(shared, rest)

    def keep(self, whole: Names, base: bytes = b"") -> Known | None:
        """Keep a prompt, in place of its `base` if it only adds to it; None if it is not kept."""
        if not LEAST_BLOCKS <= whole.blocks <= self.most:
            return None
        known = self._held.get(base)
        if known is not None and _begins(known.digests, whole.digests):
            self._held.move_to_end(base)
            return known
        if known is not None and _begins(whole.digests, known.digests):
            self.forget(base)
            known.grow(whole)
        else:
            known = Known(whole)
        self._put(known)
        return known

    def forget(self, name: bytes) -> None:
        known = self._held.pop(name, None)
        self.blocks -= known.blocks if known is not None else 0

    def _put(self, known: Known) -> None:
        self.forget(known.name)
        self._held[known.name] = known
        self.blocks += known.blocks
        while self.blocks > self.most:
            self.forget(next(iter(self._held)))


class SentPrompts:
    """What a kvbm keeps of the prompts that it was sent: up to `most` blocks of them."""

    def __init__(self, most: int) -> None:
        self._prompts = KnownPrompts(most)
        self._marks: WeakValueDictionary[bytes, Known] = WeakValueDictionary()

    @property
    def blocks(self) -> int:
        return self._prompts.blocks

    def shorten(self, message: M) -> M:
        """`message` without the blocks that the kvbm knows, or as it is."""
        base, shared = self._base(message.digests)
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

    def sent(self, digests: bytes, base: bytes) -> None:
        """The kvbm has a whole prompt, which was sent as what follows `base`."""
        known = self._prompts.keep(Names(digests), base)
        if known is None:
            return
        for end in _mark_ends(known.blocks):
            mark = _digest(known.digests, end - 1)
            if self._marks.get(mark) is known:
                break
            self._marks[mark] = known

    def forget(self, base: bytes) -> None:
        """The kvbm does not know it any more."""
        self._prompts.forget(base)

    def _base(self, digests: bytes) -> tuple[bytes, int]:
        """The prompt that begins like this one for longest, and for how many blocks."""
        count = len(digests) // DIGEST_BYTES
        for end in _mark_ends(count):
            known = self._marks.get(_digest(digests, end - 1))
            if known is not None:
                return known.name, _alike(known, digests, end, min(count, known.blocks))
        return b"", 0


def _digest(packed: bytes | bytearray, block: int) -> bytes:
    return bytes(packed[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)])


def _begins(longer: bytes | bytearray, shorter: bytes | bytearray) -> bool:
    end = len(shorter)
    return longer[end - DIGEST_BYTES : end] == shorter[-DIGEST_BYTES:]


def _mark_ends(blocks: int) -> range:
    """A prompt is found by every LEAST_BLOCKS-th of its blocks; from its end."""
    return range(blocks // LEAST_BLOCKS * LEAST_BLOCKS, 0, -LEAST_BLOCKS)


def _alike(known: Known, digests: bytes, least: int, most: int) -> int:
    """How many blocks two prompts have in common, of which `least` are known to be."""
    differing = bisect_left(
        range(least, most), True, key=lambda i: _digest(known.digests, i) != _digest(digests, i)
    )
    return least + differing
