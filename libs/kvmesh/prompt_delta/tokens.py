"""Prompt deltas in tokens: `Work` from a frontend to a worker."""

from msgspec.structs import replace

from kvmesh.bus.messages import Work
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.runtime.lru import LruCache

MIN_BYTES = 4096 * TOKEN_BYTES  # shorter prompts are cheaper to send again than to store
SENT_BYTES = 32 << 20
RECEIVED_BYTES = 64 << 20
# A prompt ends with a generation prompt, which the conversation's next prompt may not repeat.
VOLATILE_BYTES = 64 * TOKEN_BYTES

SentKey = tuple[str, int, str]


class SentPromptCache:
    """The sender's side: the latest prompt of each session that each worker has stored.

    `max_bytes` bounds the tokens held.
    """

    def __init__(self, max_bytes: int = SENT_BYTES) -> None:
        self._sent: LruCache[SentKey, tuple[str, bytes]] = LruCache(max_bytes, _sent_bytes)

    @property
    def size(self) -> int:
        return self._sent.size

    def shorten(self, instance: str, work: Work) -> Work:
        """Return `work` without the tokens that `instance` has stored, or `work` itself."""
        request, tokens = self._sent.peek(_sent_key(instance, work)) or ("", b"")
        for base in (tokens, tokens[:-VOLATILE_BYTES]):
            if base and work.tokens.startswith(base):
                rest = work.tokens[len(base) :]
                return replace(work, tokens=rest, base=request, shared=len(base) // TOKEN_BYTES)
        return work

    def store(self, instance: str, work: Work) -> None:
        """Record that `instance` has stored the prompt of `work`."""
        if work.session is not None and len(work.tokens) <= self._sent.max_size:
            self._sent.put(_sent_key(instance, work), (work.request, work.tokens))

    def forget(self, instance: str, work: Work) -> None:
        """Record that `instance` no longer has the earlier prompt of this session."""
        self._sent.pop(_sent_key(instance, work))


class PromptCache:
    """The receiver's side: long prompts of earlier requests, by request id.

    `max_bytes` bounds the tokens held; the least recently stored prompt is evicted first.
    """

    def __init__(self, max_bytes: int = RECEIVED_BYTES) -> None:
        self._prompts: LruCache[str, bytes] = LruCache(max_bytes, _bytes_of)

    @property
    def size(self) -> int:
        return self._prompts.size

    def complete(self, work: Work) -> Work | None:
        """Return `work` with its whole prompt; None if its base is not held."""
        if not work.base:
            return work
        base = self._prompts.peek(work.base) or b""
        size = work.shared * TOKEN_BYTES
        if not 0 < size <= len(base):
            return None
        return replace(work, tokens=base[:size] + work.tokens, base="", shared=0)

    def store(self, work: Work, base: str = "") -> bool:
        """Store the whole prompt of `work`, replacing its base; False if it is not stored."""
        self._prompts.pop(base)
        if not MIN_BYTES <= len(work.tokens) <= self._prompts.max_size:
            return False
        return self._prompts.put(work.request, work.tokens)


def _sent_key(instance: str, work: Work) -> SentKey:
    return instance, work.salt, work.session or ""


def _sent_bytes(_key: SentKey, sent: tuple[str, bytes]) -> int:
    return len(sent[1])


def _bytes_of(_request: str, tokens: bytes) -> int:
    return len(tokens)
