"""Block digests: 128-bit keyed digests of everything that a block's KV depends on.

Digests identify blocks in shared tiers. The 64-bit hashes of the index do not suffice: a caller who
chooses tokens can make two prompts collide. Colliding digests cannot be found without the mesh's
key, and the chance of an accidental collision among 2⁴⁰ blocks is below 2⁻⁴⁸.
"""

from array import array
from hashlib import blake2b

import msgspec

from kvmesh.bus.messages import KvLayout
from kvmesh.hashing import DIGEST_BYTES, TOKEN_BYTES

KEY_BYTES = 32
FINGERPRINT_BYTES = 4
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def fingerprint(key: bytes) -> str:
    """Return 8 hexadecimal digits that identify a key and reveal nothing of it (docs/kvbm.md)."""
    return blake2b(digest_size=FINGERPRINT_BYTES, key=key, person=b"fingerprint").hexdigest()


def root_digest(key: bytes, model: str, adapter: str, tenant: str, layout: KvLayout) -> bytes:
    """Return the digest that precedes the first block of a namespace. `key` has KEY_BYTES."""
    described = _encode((model, adapter, tenant, layout))
    return blake2b(described, digest_size=DIGEST_BYTES, key=key).digest()


def chain_digests(key: bytes, previous: bytes, tokens: bytes, block_size: int) -> bytes:
    """Return packed digests of the full blocks of `tokens` (packed uint32), each chained."""
    step = TOKEN_BYTES * block_size
    digests = bytearray()
    for end in range(step, len(tokens) + 1, step):
        block = blake2b(previous, digest_size=DIGEST_BYTES, key=key)
        block.update(tokens[end - step : end])
        previous = block.digest()
        digests += previous
    return bytes(digests)


def part_digests(key: bytes, lead: bytes, layout: KvLayout) -> bytes:
    """Return packed digests of the blocks of a part, from those of the lead (`KvLayout.part`).

    They differ by a keyed mask of the part's own layout, which is much cheaper than another chain.
    """
    if not layout.part:
        return lead
    mask = blake2b(_encode(layout), digest_size=DIGEST_BYTES, key=key, person=b"part").digest()
    count = len(lead) // DIGEST_BYTES
    mixed = int.from_bytes(lead, "little") ^ int.from_bytes(mask * count, "little")
    return mixed.to_bytes(len(lead), "little")


class DigestChain:
    """Digests of one growing prompt, each computed once per key."""

    def __init__(self, model: str, adapter: str, tenant: str, layout: KvLayout) -> None:
        self._names = (model, adapter, tenant)
        self._layout = layout
        self._key = b""
        self._previous = b""
        self._digests = bytearray()

    def upto(self, key: bytes, tokens: "array[int]", blocks: int) -> bytes:
        """Return packed digests of the first `blocks` blocks of `tokens` (uint32)."""
        if key != self._key:
            self._key = key
            self._previous = root_digest(key, *self._names, self._layout)
            self._digests.clear()
        size = self._layout.block_size
        known = len(self._digests) // DIGEST_BYTES
        if known < blocks:
            rest = tokens[known * size : blocks * size].tobytes()
            self._digests += chain_digests(key, self._previous, rest, size)
            self._previous = bytes(self._digests[-DIGEST_BYTES:])
        return bytes(self._digests[: blocks * DIGEST_BYTES])


def split_digests(packed: bytes) -> list[bytes]:
    """Unpack digests into a list, one `bytes` each."""
    return [packed[i : i + DIGEST_BYTES] for i in range(0, len(packed), DIGEST_BYTES)]
