"""Names for what the native core hashes: blocks of tokens, and the namespace they live in."""

from kvmesh._native import block_hashes, sequence_hashes, xxh3

__all__ = ["HASH_VERSION", "block_hashes", "salt", "sequence_hashes"]

HASH_VERSION = 1  # of all that is hashed here and in the native core; workers must agree on it


def salt(model: str, adapter: str = "", tenant: str = "") -> int:
    """Return the hash that precedes the first block of every prompt in one namespace.

    Each field is length-prefixed, so no two different triples have the same encoding.
    """
    fields = [field.encode() for field in (model, adapter, tenant)]
    return xxh3(b"".join(len(field).to_bytes(4, "little") + field for field in fields))
