"""Sessions that nobody named, inferred from growth: a prompt that extends an earlier one whole.

A prompt is remembered by the sequence hash of its last full block, which stands for everything
before it, and by the tokens behind that block. A later prompt continues it if it holds that block
at the same place and goes on with those tokens. Hashes are salted, so tenants never meet.
"""

from collections import OrderedDict

HASH = 8
TOKEN = 4
MAX_TAILS = 8
MAX_BLOCKS_BACK = 1024

Tails = dict[bytes, str]


class InferredSessions:
    """The last `limit` prompts' ends. Pure; one per frontend."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._begun = 0
        self._ends: OrderedDict[bytes, Tails] = OrderedDict()

    def observe(self, sequence: bytes, tokens: bytes, block_size: int) -> str | None:
        """Remember a prompt; the session that it continues, or None if it begins one.

        `sequence` are its packed sequence hashes, `tokens` its packed tokens.
        """
        blocks = len(sequence) // HASH
        if not blocks:
            return None
        found = self._find(sequence, tokens, block_size, blocks)
        last = sequence[-HASH:]
        self._begun += found is None
        session = found or f"auto-{last.hex()}-{self._begun}"
        self._remember(last, tokens[blocks * block_size * TOKEN :], session)
        return found

    def _find(self, sequence: bytes, tokens: bytes, block_size: int, blocks: int) -> str | None:
        for count in range(blocks, max(blocks - MAX_BLOCKS_BACK, 0), -1):
            tails = self._ends.get(sequence[(count - 1) * HASH : count * HASH])
            if tails is not None:
                session = _longest(tails, tokens[count * block_size * TOKEN :])
                if session is not None:
                    return session
        return None

    def _remember(self, last: bytes, tail: bytes, session: str) -> None:
        tails = self._ends.setdefault(last, {})
        self._ends.move_to_end(last)
        tails.pop(tail, None)
        tails[tail] = session
        if len(tails) > MAX_TAILS:
            del tails[next(iter(tails))]
        if len(self._ends) > self._limit:
            self._ends.popitem(last=False)


def _longest(tails: Tails, rest: bytes) -> str | None:
    """The session whose tail `rest` goes on from, by at least one token."""
    fitting = [tail for tail in tails if len(tail) < len(rest) and rest.startswith(tail)]
    return tails[max(fitting, key=len)] if fitting else None
