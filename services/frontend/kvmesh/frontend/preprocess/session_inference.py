"""Sessions that nobody named, inferred from growth: a prompt that extends an earlier one whole.

A prompt is remembered by the sequence hash of its last full block, which stands for everything
before it, and by the tokens behind that block. A later prompt continues it if it holds that block
at the same place and goes on with those tokens, for the same tenant.
"""

from kvmesh.hashing import HASH_BYTES, TOKEN_BYTES
from kvmesh.runtime.lru import LruCache

MAX_TAILS = 8
MAX_BLOCKS_BACK = 1024

Tails = dict[bytes, str]


class InferredSessions:
    """The last `limit` prompts' ends. Pure; one per frontend."""

    def __init__(self, limit: int = 10_000) -> None:
        self._begun = 0
        self._ends: LruCache[tuple[str, bytes], Tails] = LruCache(limit)

    def observe(self, tenant: str, sequence: bytes, tokens: bytes, block_size: int) -> str | None:
        """Remember a prompt; the session that it continues, or None if it begins one.

        `sequence` are its packed sequence hashes, `tokens` its packed tokens.
        """
        blocks = len(sequence) // HASH_BYTES
        if not blocks:
            return None
        found = self._find(tenant, sequence, tokens, block_size)
        last = sequence[-HASH_BYTES:]
        self._begun += found is None
        session = found or f"auto-{last.hex()}-{self._begun}"
        self._remember((tenant, last), tokens[blocks * block_size * TOKEN_BYTES :], session)
        return found

    def _find(self, tenant: str, sequence: bytes, tokens: bytes, block_size: int) -> str | None:
        blocks = len(sequence) // HASH_BYTES
        for count in range(blocks, max(blocks - MAX_BLOCKS_BACK, 0), -1):
            tails = self._ends.peek(
                (tenant, sequence[(count - 1) * HASH_BYTES : count * HASH_BYTES])
            )
            if tails is not None:
                session = _longest(tails, tokens[count * block_size * TOKEN_BYTES :])
                if session is not None:
                    return session
        return None

    def _remember(self, end: tuple[str, bytes], tail: bytes, session: str) -> None:
        tails = self._ends.peek(end) or {}
        self._ends.put(end, tails)
        tails.pop(tail, None)
        tails[tail] = session
        if len(tails) > MAX_TAILS:
            del tails[next(iter(tails))]


def _longest(tails: Tails, rest: bytes) -> str | None:
    """The session whose tail `rest` goes on from, by at least one token."""
    fitting = [tail for tail in tails if len(tail) < len(rest) and rest.startswith(tail)]
    return tails[max(fitting, key=len)] if fitting else None
