"""The last prompt of each conversation, cut and tokenized, so that a turn costs what it adds.

A rendered conversation is cut at special tokens. Where two texts agree up to a cut, and as far
behind it as the longest special token, they are cut alike up to there: whatever begins before
that place ends before it, or is seen whole.
"""

from collections.abc import Sequence
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

from kvmesh.runtime.lru import LruCache

ENTRY_BYTES = 300
EDGE_BYTES = 16

Key = tuple[int, int]


class EncodedPrompt(NamedTuple):
    """A text with its packed tokens; `sizes` are the bytes of tokens before each of its `edges`.

    Edges are where its segments begin, and its end.
    """

    text: str = ""
    edges: Sequence[int] = (0,)
    sizes: Sequence[int] = (0,)
    tokens: bytes = b""

    @property
    def end(self) -> int:
        return self.edges[-1]

    def before(self, place: int) -> "EncodedPrompt":
        """Its first `place` segments; of the text nothing is cut off."""
        edges, sizes = self.edges[: place + 1], self.sizes[: place + 1]
        return EncodedPrompt(self.text, edges, sizes, self.tokens[: sizes[-1]])

    def extended(self, text: str, segments: list[str], tokens: list[bytes]) -> "EncodedPrompt":
        """What is here as the beginning of `text`, with the segments behind it."""
        edges = [*self.edges[:-1], *accumulate(map(len, segments), initial=self.edges[-1])]
        sizes = [*self.sizes[:-1], *accumulate(map(len, tokens), initial=self.sizes[-1])]
        return EncodedPrompt(text, edges, sizes, b"".join([self.tokens, *tokens]))


class PrefixTokenCache:
    """The longest unused first out; `limit` in bytes bounds them. Any thread may ask."""

    def __init__(self, limit: int) -> None:
        self._held: LruCache[Key, EncodedPrompt] = LruCache(limit, _size)
        self._lock = Lock()

    @property
    def size(self) -> int:
        return self._held.size

    def find(self, key: Key, text: str, margin: int) -> EncodedPrompt:
        """What is known of the beginning of `text`; no special token is longer than `margin`."""
        known = self._held.peek(key)
        if known is None:
            return EncodedPrompt()
        place, step = len(known.edges) - 1, 1
        while place > step:
            place -= step
            step *= 2
            end = known.edges[place] + margin
            if end <= len(known.text) and text.startswith(known.text[:end]):
                return known.before(place)
        return EncodedPrompt()

    def keep(self, key: Key, encoded: EncodedPrompt) -> None:
        """In place of what is kept there."""
        with self._lock:
            self._held.put(key, encoded)


def _size(_key: Key, encoded: EncodedPrompt) -> int:
    text, edges, _, tokens = encoded
    width = 1 if text.isascii() else 4
    return ENTRY_BYTES + width * len(text) + EDGE_BYTES * len(edges) + len(tokens)
