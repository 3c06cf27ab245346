"""Hashes of blocks and of namespaces, and the sizes of packed hashes and tokens."""

from hashlib import blake2b
from typing import Final

from kvmesh._native import block_hashes, sequence_hashes, xxh3

__all__ = [
    "DIGEST_BYTES",
    "HASH_BYTES",
    "HASH_VERSION",
    "TOKEN_BYTES",
    "block_hashes",
    "salt",
    "sequence_hashes",
]

HASH_BYTES: Final = 8  # of one packed hash
DIGEST_BYTES: Final = 16  # of one block digest (kvmesh.blocks.digests)
TOKEN_BYTES: Final = 4  # of one packed token id
HASH_VERSION: Final = 1  # of all hashes here and in the native core; workers must agree on it


def salt(model: str, adapter: str = "", tenant: str = "", key: bytes = b"") -> int:
    """Return the hash that precedes the first block of every prompt in one namespace.

    Fields are length-prefixed, so different triples have different encodings. Without a tenant the
    salt is the XXH3 of the encoding, which any process can compute. With a tenant it is its BLAKE2b
    under `key`, at most 64 bytes: tenants with equal salts cannot be found without the key.
    """
    fields = [field.encode() for field in (model, adapter, tenant)]
    packed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    if not tenant:
        return xxh3(packed)
    return int.from_bytes(blake2b(packed, digest_size=8, key=key, person=b"kvmesh salt").digest())
