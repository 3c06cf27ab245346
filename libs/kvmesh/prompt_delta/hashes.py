"""Prompt deltas in sequence hashes: route requests to routers, overlap queries to indexers.

A sequence hash names all blocks up to its own, so the last one of a prompt names the prompt.
"""

from kvmesh.hashing import HASH_BYTES
from kvmesh.runtime.fair_lru import FairLru
from kvmesh.runtime.lru import LruCache

MIN_BYTES = 128 * HASH_BYTES  # shorter prompts are cheaper to send again than to store
RECEIVED_BYTES = 32 << 20
SENT_BYTES = RECEIVED_BYTES // 2  # senders share the receiver's cache
# A prompt ends with a generation prompt, which the conversation's next prompt may not repeat.
TAIL_BYTES = 8 * HASH_BYTES

SentKey = tuple[str, int | None, str]


class SentHashes:
    """The sender's side: the latest prompt of each session that each receiver has.

    A key is the receiver's instance, the prompt's salt and its session. `max_bytes` bounds what the
    receivers hold for this sender; here it is a few hundred bytes for each prompt.
    """

    def __init__(self, max_bytes: int = SENT_BYTES) -> None:
        self._sent: LruCache[SentKey, tuple[int, bytes]] = LruCache(max_bytes, _received_bytes)

    def base_of(self, key: SentKey, hashes: bytes) -> tuple[bytes, int]:
        """Return the last hash of the prompt to refer to, and the shared blocks; b"" for none."""
        size, tail = self._sent.peek(key) or (0, b"")
        for back in range(0, len(tail), HASH_BYTES):
            end = size - back
            if hashes[end - HASH_BYTES : end] == tail[-back - HASH_BYTES : len(tail) - back]:
                return tail[-HASH_BYTES:], end // HASH_BYTES
        return b"", 0

    def store(self, key: SentKey, hashes: bytes) -> None:
        """Record that a receiver gets this prompt, by which the next one of the session may go."""
        if len(hashes) >= MIN_BYTES:
            self._sent.put(key, (len(hashes), hashes[-TAIL_BYTES:]))

    def forget(self, key: SentKey) -> None:
        """Record that a receiver no longer has the earlier prompt of this session."""
        self._sent.pop(key)


class ReceivedHashes:
    """The receiver's side: long prompts by their last hash, at most `max_bytes` in all.

    Beyond that, the salt with the most bytes loses its least recent prompt.
    """

    def __init__(self, max_bytes: int = RECEIVED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._prompts: FairLru[bytes, bytes] = FairLru(max_bytes, _bytes_of)

    @property
    def size(self) -> int:
        return self._prompts.size

    def complete(self, salt: int | None, base: bytes, shared: int, rest: bytes) -> bytes | None:
        """Return the first `shared` blocks of `base`, then `rest`; None if they are not held.

        The whole prompt replaces its base.
        """
        owner, whole = str(salt), rest
        if base:
            held, size = self._prompts.get(owner, base) or b"", shared * HASH_BYTES
            if not 0 < size <= len(held):
                return None
            whole = held[:size] + rest
        if MIN_BYTES <= len(whole) <= self._max_bytes:
            self._prompts.pop(owner, base)
            self._prompts.put(owner, whole[-HASH_BYTES:], whole)
        return whole


def _received_bytes(_key: SentKey, sent: tuple[int, bytes]) -> int:
    return sent[0]


def _bytes_of(_last: bytes, hashes: bytes) -> int:
    return len(hashes)
