"""Binds a block in a store to its digest: whoever can write there cannot choose a block's KV."""

import hmac
from hashlib import blake2b

SEAL_BYTES = 16
_PERSON = b"kvmesh.remote"


class Seal:
    """Made with a key of its own, which is derived from that of block digests.

    HMAC-SHA-256, cut to 128 bits: a checksum like XXH3 is no MAC, even with a secret seed.
    """

    def __init__(self, key: bytes) -> None:
        self._key = blake2b(key=key, person=_PERSON, digest_size=32).digest()

    def put(self, digest: bytes, note: bytes, content: memoryview | bytearray) -> bytes:
        """The note with its seal before it."""
        return self._of(digest, note, content) + note

    def take(self, digest: bytes, sealed: bytes, content: memoryview | bytearray) -> bytes | None:
        """The note; None unless all this was put together by somebody with the key."""
        seal, note = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        return note if hmac.compare_digest(seal, self._of(digest, note, content)) else None

    def _of(self, digest: bytes, note: bytes, content: memoryview | bytearray) -> bytes:
        made = hmac.new(self._key, digest, "sha256")
        made.update(len(note).to_bytes(4, "little"))
        made.update(note)
        made.update(content)
        return made.digest()[:SEAL_BYTES]
