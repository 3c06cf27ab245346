"""Sessions of requests that name none, inferred from prompts that extend an earlier one.

A prompt is stored as the sequence hash of its last full block, which covers everything before it,
and the tokens after that block (its tail). A later prompt of the same tenant continues it if it
contains that block and continues with those tokens.
"""

from kvmesh.hashing import HASH_BYTES, TOKEN_BYTES
from kvmesh.runtime.lru import LruCache

MAX_TAILS = 8
MAX_BLOCKS_BACK = 1024

Tails = dict[bytes, str]


class InferredSessions:
    """The ends of the last `limit` prompts. Pure; one per frontend process."""

    def __init__(self, limit: int = 10_000) -> None:
        self._started = 0
        self._ends: LruCache[tuple[str, bytes], Tails] = LruCache(limit)

    def observe(
        self, tenant: str, sequence_hashes: bytes, tokens: bytes, block_size: int
    ) -> str | None:
        """Store a prompt; return the session that it continues, or None if it starts one.

        `sequence_hashes` and `tokens` are packed.
        """
        blocks = len(sequence_hashes) // HASH_BYTES
        if not blocks:
            return None
        found = self._find(tenant, sequence_hashes, tokens, block_size)
        last = sequence_hashes[-HASH_BYTES:]
        self._started += found is None
        session = found or f"auto-{last.hex()}-{self._started}"
        self._store((tenant, last), tokens[blocks * block_size * TOKEN_BYTES :], session)
        return found

    def _find(
        self, tenant: str, sequence_hashes: bytes, tokens: bytes, block_size: int
    ) -> str | None:
        blocks = len(sequence_hashes) // HASH_BYTES
        for count in range(blocks, max(blocks - MAX_BLOCKS_BACK, 0), -1):
            last = sequence_hashes[(count - 1) * HASH_BYTES : count * HASH_BYTES]
            tails = self._ends.peek((tenant, last))
            if tails is not None:
                session = _longest(tails, tokens[count * block_size * TOKEN_BYTES :])
                if session is not None:
                    return session
        return None

    def _store(self, end: tuple[str, bytes], tail: bytes, session: str) -> None:
        tails = self._ends.peek(end) or {}
        self._ends.put(end, tails)
        tails.pop(tail, None)
        tails[tail] = session
        if len(tails) > MAX_TAILS:
            del tails[next(iter(tails))]


def _longest(tails: Tails, rest: bytes) -> str | None:
    """The session with the longest tail that `rest` extends by at least one token."""
    extended = [tail for tail in tails if len(tail) < len(rest) and rest.startswith(tail)]
    return tails[max(extended, key=len)] if extended else None
