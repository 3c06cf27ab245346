"""Tells apart prompts whose blocks have the same hash.

The hashes by which an engine knows its blocks are short, and whoever chooses tokens can make two
prompts collide in them. So beside each block stands a print of its whole prefix, made with a key
that only this process has. Where prints differ, the newcomer's blocks get hashes of their own.
"""

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Iterable

from kvmesh.blocks.digests import KEY_BYTES, DigestChain
from kvmesh.bus.messages import KvEvent, KvLayout, Removed, Work
from kvmesh.hashing import DIGEST_BYTES


class Prints:
    """The prints of one growing prompt."""

    def __init__(self, key: bytes, chain: DigestChain) -> None:
        self._key = key
        self._chain = chain

    def upto(self, tokens: "array[int]", blocks: int) -> bytes:
        """Packed prints of the first `blocks` blocks of `tokens`."""
        return self._chain.upto(self._key, tokens, blocks)


class CollisionGuard:
    """The prints of the blocks that are held, by hash."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        self._key = secrets.token_bytes(KEY_BYTES)
        self._prints: dict[int, bytes] = {}

    def prints(self, work: Work) -> Prints:
        """Those of a request's prompt; its salt stands for model and tenant."""
        chain = DigestChain(f"{work.salt:x}", work.adapter or "", work.tenant, self._layout)
        return Prints(self._key, chain)

    def note(self, hashes: "array[int]", prints: bytes) -> None:
        """Blocks that get these hashes have these prints, packed."""
        for i, block in enumerate(hashes):
            self._prints[block] = prints[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]

    def follow(self, events: Iterable[KvEvent]) -> None:
        """Forget blocks that are gone."""
        for event in events:
            if isinstance(event, Removed):
                for block in array("Q", event.engine):
                    self._prints.pop(block, None)

    def sound(self, held: "array[int]", prints: bytes) -> int:
        """How many leading ones of these held blocks belong to the prompt with these prints."""

        def wrong(place: int) -> bool:
            own = prints[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            return self._prints.get(held[place]) != own

        if not held or not wrong(len(held) - 1):
            return len(held)
        return bisect_left(range(len(held)), True, key=wrong)

    def free(self, fresh: "array[int]", prints: bytes) -> int:
        """The number of leading hashes that no block with another print has."""
        for place, block in enumerate(fresh):
            own = prints[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            if self._prints.get(block, own) != own:
                return place
        return len(fresh)

    def fresh_seed(self) -> int:
        """What to begin a chain of hashes with that nobody else has."""
        return secrets.randbits(64)
