"""Hashes of blocks and of namespaces, and the sizes of packed hashes and tokens."""

from hashlib import blake2b
from typing import Final

import numpy as np

from kvmesh._native import block_hashes, sequence_hashes, xxh3

__all__ = [
    "DIGEST_BYTES",
    "FIRST_IMAGE_TOKEN",
    "HASH_BYTES",
    "HASH_VERSION",
    "TOKEN_BYTES",
    "block_hashes",
    "has_image_tokens",
    "image_tokens",
    "salt",
    "sequence_hashes",
]

HASH_BYTES: Final = 8  # of one packed hash
DIGEST_BYTES: Final = 16  # of one block digest (kvmesh.blocks.digests)
TOKEN_BYTES: Final = 4  # of one packed token id
FIRST_IMAGE_TOKEN: Final = 1 << 31  # id; smaller ones are those of vocabularies
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


def image_tokens(digest: bytes, length: int, skip: int = 0) -> bytes:
    """Packed ids that stand in a prompt for `length` tokens of an image, by its SHA-256.

    They are FIRST_IMAGE_TOKEN and more, so none is an id of a vocabulary, and block hashes of them
    are hashes of the content. Eight ids have 248 bits of the digest; longer images repeat them. The
    first `skip` tokens of the image are left out.
    """
    words = np.frombuffer(digest, "<u4") | FIRST_IMAGE_TOKEN
    return np.resize(np.roll(words, -skip), length).astype("<u4").tobytes()


def has_image_tokens(tokens: bytes) -> bool:
    """True if there are tokens of images in a prompt of packed ids."""
    return bool((np.frombuffer(tokens, "<u4") >= FIRST_IMAGE_TOKEN).any())
