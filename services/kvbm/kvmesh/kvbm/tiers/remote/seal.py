"""Seal of a block in a remote store: a writer without the key cannot choose a block's KV."""

import hmac
from hashlib import blake2b

SEAL_BYTES = 16
_PERSON = b"kvmesh.remote"


class Seal:
    """HMAC-SHA-256 truncated to 128 bits, with a key derived from that of block digests.

    A checksum like XXH3 is no MAC, even with a secret seed.
    """

    def __init__(self, key: bytes) -> None:
        self._key = blake2b(key=key, person=_PERSON, digest_size=32).digest()

    def seal(self, digest: bytes, note: bytes, content: memoryview | bytearray) -> bytes:
        """The note, prefixed with the seal."""
        return self._mac(digest, note, content) + note

    def open(self, digest: bytes, sealed: bytes, content: memoryview | bytearray) -> bytes | None:
        """The note; None if the seal does not match digest, note and content."""
        seal, note = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        return note if hmac.compare_digest(seal, self._mac(digest, note, content)) else None

    def _mac(self, digest: bytes, note: bytes, content: memoryview | bytearray) -> bytes:
        mac = hmac.new(self._key, digest, "sha256")
        mac.update(len(note).to_bytes(4, "little"))
        mac.update(note)
        mac.update(content)
        return mac.digest()[:SEAL_BYTES]
