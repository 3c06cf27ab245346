"""Detects prompts whose blocks collide in their sequence hashes.

Sequence hashes have 64 bits, and a caller who chooses tokens can construct collisions. So each
block has a fingerprint of its whole prefix, keyed with a secret of this process. Where fingerprints
differ, the blocks of the later prompt are rehashed.
"""

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Iterable

from kvmesh.blocks.digests import KEY_BYTES, DigestChain
from kvmesh.bus.messages import KvEvent, KvLayout, Removed, Work
from kvmesh.hashing import DIGEST_BYTES


class PrefixFingerprints:
    """Fingerprints of the blocks of one growing prompt."""

    def __init__(self, key: bytes, chain: DigestChain) -> None:
        self._key = key
        self._chain = chain

    def upto(self, tokens: "array[int]", blocks: int) -> bytes:
        """Packed fingerprints of the first `blocks` blocks of `tokens`."""
        return self._chain.upto(self._key, tokens, blocks)


class CollisionGuard:
    """Fingerprints of the held blocks by sequence hash."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._key = secrets.token_bytes(KEY_BYTES)
        self._fingerprints: dict[int, bytes] = {}

    def fingerprints(self, work: Work) -> PrefixFingerprints:
        """Fingerprints of a request's prompt; its salt represents model and tenant."""
        chain = DigestChain(f"{work.salt:x}", work.adapter or "", work.tenant, self._layout)
        return PrefixFingerprints(self._key, chain)

    def record(self, hashes: "array[int]", fingerprints: bytes) -> None:
        """Record the packed fingerprints of blocks that get these hashes."""
        for i, sequence_hash in enumerate(hashes):
            self._fingerprints[sequence_hash] = fingerprints[
                i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES
            ]

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Forget removed blocks."""
        for event in events:
            if isinstance(event, Removed):
                for sequence_hash in array("Q", event.engine):
                    self._fingerprints.pop(sequence_hash, None)

    def count_matching(self, hashes: "array[int]", fingerprints: bytes) -> int:
        """Number of leading held blocks whose fingerprints match."""

        def differs(index: int) -> bool:
            expected = fingerprints[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            return self._fingerprints.get(hashes[index]) != expected

        if not hashes or not differs(len(hashes) - 1):
            return len(hashes)
        return bisect_left(range(len(hashes)), True, key=differs)

    def count_unclaimed(self, hashes: "array[int]", fingerprints: bytes) -> int:
        """Number of leading hashes not recorded with another fingerprint."""
        for index, sequence_hash in enumerate(hashes):
            expected = fingerprints[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if self._fingerprints.get(sequence_hash, expected) != expected:
                return index
        return len(hashes)

    def new_seed(self) -> int:
        """A random start for a new chain of sequence hashes."""
        return secrets.randbits(64)
