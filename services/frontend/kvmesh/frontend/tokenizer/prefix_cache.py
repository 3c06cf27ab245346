"""The last prompt of each conversation with its tokens, so that a turn only encodes what it adds.

The encoder splits a rendered conversation into segments at special tokens. Two texts that agree up
to an edge and for the length of the longest special token after it have the same segments up to
that edge: a special token that begins before the edge is within the common text.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from threading import Lock
from typing import NamedTuple

from kvmesh.frontend.conversation import Insertion, RenderedPrompt
from kvmesh.frontend.tokenizer.encoder import TextEncoder
from kvmesh.runtime.lru import LruCache

ENTRY_BYTES = 300
PROBE = 256  # characters
EDGE_BYTES = 32  # of an edge, and of a cut, which is one, too

Key = tuple[int, int]


class TextPiece(NamedTuple):
    """A part of a text whose tokens do not depend on the rest; `tokens` are packed, if known."""

    text: str
    tokens: bytes | None = None


def text_pieces(rendered: RenderedPrompt, encoder: TextEncoder, start: int = 0) -> list[TextPiece]:
    """The text from `start` on: segments, and answers whose tokens are known."""
    text, pieces = rendered.text, list[TextPiece]()
    if not rendered.cuts and not rendered.insertions:
        return [*map(TextPiece, encoder.segments(text[start:] if start else text))]
    for insertion in rendered.insertions:
        if start <= insertion.start < len(text):
            pieces += _segments(rendered, encoder, start, insertion.start)
            pieces.append(TextPiece(text[insertion.start : insertion.end], insertion.tokens))
            start = insertion.end
    return [*pieces, *_segments(rendered, encoder, start, len(text))]


def _segments(
    rendered: RenderedPrompt, encoder: TextEncoder, start: int, end: int
) -> Iterator[TextPiece]:
    """The segments of a part of the text, which end at its cuts, too."""
    text, cuts = rendered.text, rendered.cuts
    inner = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)] if cuts else ()
    for first, last in pairwise((start, *inner, end)):
        yield from map(TextPiece, encoder.segments(text[first:last]))


class EncodedPrompt(NamedTuple):
    """A text and its packed tokens.

    `edges`: character offsets of its segments' starts and of the end covered by `tokens`;
    `sizes`: bytes of packed tokens before each edge; `cuts` as in `RenderedPrompt`.
    """

    text: str = ""
    edges: Sequence[int] = (0,)
    sizes: Sequence[int] = (0,)
    tokens: bytes = b""
    cuts: Sequence[int] = ()

    @property
    def end(self) -> int:
        """Character offset up to which the text is encoded."""
        return self.edges[-1]

    def first(self, count: int) -> "EncodedPrompt":
        """The tokens of the first `count` segments; `text` stays whole."""
        edges, sizes = self.edges[: count + 1], self.sizes[: count + 1]
        return EncodedPrompt(self.text, edges, sizes, self.tokens[: sizes[-1]], self.cuts)

    def outside(self, insertions: Sequence[Insertion]) -> "EncodedPrompt":
        """As much of this as does not end within an insertion into the text."""
        around = next((i for i in insertions if i.start < self.end < i.end), None)
        if around is None:
            return self
        return self.first(bisect_right(self.edges, around.start) - 1)

    def extended(
        self, rendered: RenderedPrompt, segments: list[str], tokens: list[bytes]
    ) -> "EncodedPrompt":
        """A prompt that starts with the segments encoded here, continued by `segments`."""
        edges = [*self.edges[:-1], *accumulate(map(len, segments), initial=self.edges[-1])]
        sizes = [*self.sizes[:-1], *accumulate(map(len, tokens), initial=self.sizes[-1])]
        joined = b"".join([self.tokens, *tokens])
        return EncodedPrompt(rendered.text, edges, sizes, joined, rendered.cuts)


class PrefixTokenCache:
    """LRU cache of encoded prompts, bounded by `limit` bytes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._entries: LruCache[Key, EncodedPrompt] = LruCache(limit, _size)
        self._lock = Lock()

    @property
    def size(self) -> int:
        return self._entries.size

    def get(self, key: Key, rendered: RenderedPrompt, margin: int) -> EncodedPrompt:
        """The known prefix of a prompt; `margin`: characters of the longest special token."""
        text, known = rendered.text, self._entries.peek(key)
        if known is None:
            return EncodedPrompt()
        index, step = len(known.edges) - 1, 1
        while index > step:
            index -= step
            step *= 2
            end = known.edges[index] + margin
            near = slice(max(end - PROBE, 0), end)
            if end > len(known.text) or text[near] != known.text[near]:
                continue  # seen without a comparison of all
            if text.startswith(known.text[:end]):
                same = _before(known.cuts, end) == _before(rendered.cuts, end)
                return known.first(index) if same else EncodedPrompt()
        return EncodedPrompt()

    def put(self, key: Key, encoded: EncodedPrompt) -> None:
        """Replace the entry of `key`."""
        with self._lock:
            self._entries.put(key, encoded)


def _before(cuts: Sequence[int], end: int) -> Sequence[int]:
    return cuts[: bisect_left(cuts, end)] if cuts else ()


def _size(_key: Key, encoded: EncodedPrompt) -> int:
    text, edges, _, tokens, _ = encoded
    width = 1 if text.isascii() else 4
    return ENTRY_BYTES + width * len(text) + EDGE_BYTES * len(edges) + len(tokens)
