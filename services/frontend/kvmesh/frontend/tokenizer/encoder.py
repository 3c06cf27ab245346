"""Text to tokens, reusing the tokens of every part of a conversation that was seen before.

A tokenizer splits text at special tokens before anything else, so what stands between two of them
is tokenized by itself, whatever surrounds it. In a rendered conversation special tokens mark the
messages: a turn repeats the parts of the turn before it, and only new ones need the tokenizer.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from threading import Lock

from tokenizers import AddedToken, Tokenizer

from kvmesh.frontend.tokenizer.byte_level_bpe import Unknown, WordEncoder, packed
from kvmesh.frontend.tokenizer.pretokenizer import NotUnderstood
from kvmesh.frontend.tokenizer.text_slices import PROSE, SLICE, any_of, cut, find_all
from kvmesh.runtime.lru import LruCache

log = logging.getLogger(__name__)
ENTRY_BYTES = 300
_PROBE = "  Hello there,\n\n the 12345 quick  foxes'll jump — naïve 日本 🦀\n\n\n"


class SegmentMemo:
    """Tokens by (tenant, text), least recently used out first; `limit` in bytes bounds it.

    Any thread may ask it.
    """

    def __init__(self, limit: int) -> None:
        self._held: LruCache[tuple[int, str], bytes] = LruCache(limit, _size)
        self._lock = Lock()

    @property
    def size(self) -> int:
        return self._held.size

    def get(self, tenant: int, text: str) -> bytes | None:
        with self._lock:
            return self._held.get((tenant, text))

    def put(self, tenant: int, text: str, tokens: bytes) -> None:
        key = (tenant, text)
        with self._lock:
            if key not in self._held:
                self._held.put(key, tokens)


def _size(key: tuple[int, str], tokens: bytes) -> int:
    text = key[1]
    # characters beyond Latin-1 take two or four bytes each
    width = 1 if text.isascii() else 4
    return ENTRY_BYTES + width * len(text) + len(tokens)


class TextEncoder:
    """Splits text at special tokens; `steps` are slow and may be taken in any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        markers = [t.content for t in tokenizer.get_added_tokens_decoder().values() if _hard(t)]
        self.longest_marker = max(map(len, markers), default=0)
        self._marker = re.compile(any_of(markers)) if markers else None
        self._words: WordEncoder | None = None
        self._cuts = False
        if not self._is_faithful(markers):
            self._marker = None
        self._cuts = self._cuts_are_words()
        self._words = self._word_encoder()
        if self._words is not None and not self._is_faithful(markers):
            log.warning("this tokenizer is not what its file says: its texts are not cut here")
            self._words = None

    @property
    def longest_token(self) -> int | None:
        """Most bytes of text in a token; None where a token may stand for any text."""
        return self._words.longest_token if self._words is not None else None

    def segments(self, text: str) -> list[str]:
        """Parts whose tokens, one after the other, are the tokens of the whole."""
        if self._marker is None:
            return [text]
        starts = [m.start() for m in find_all(self._marker, text, self.longest_marker)]
        edges = [0, *starts, len(text)]
        return [text[a:b] for a, b in pairwise(edges) if a < b]

    def steps(self, segment: str) -> Iterator[bytes]:
        """Packed tokens of a segment, a slice at a time; adds no special tokens."""
        if self._words is not None:
            try:
                yield from self._words.steps(segment)
                return
            except Unknown:
                pass  # nothing has been told of it yet
        for part in cut(segment) if self._cuts else (segment,):
            yield self._by_library([part])[0]

    def encode_segments(self, segments: list[str]) -> list[bytes]:
        """Packed tokens of each."""
        return [b"".join(self.steps(segment)) for segment in segments]

    def text_steps(self, text: str) -> Iterator[bytes]:
        """Packed tokens of a plain text with what the tokenizer puts around one."""
        if len(text) < SLICE:
            yield packed(self._around(text))
            return
        whole, bare = self._around("x"), self._by_library(["x"])[0]
        before, found, after = packed(whole).partition(bare)
        yield before
        for segment in self.segments(text):
            yield from self.steps(segment)
        yield after if found else b""

    def _around(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids

    def _by_library(self, segments: list[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(segments, add_special_tokens=False)
        return [packed(encoding.ids) for encoding in encodings]

    def _cuts_are_words(self) -> bool:
        """Whether texts may be cut between words: tried, since no file promises it."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if any(list(cut(token.content, 1)) != [token.content] for token in added):
            return False
        parts = list(cut(PROSE, 1))
        return b"".join(self._by_library(parts)) == self._by_library([PROSE])[0]

    def _word_encoder(self) -> WordEncoder | None:
        try:
            return WordEncoder(self._tokenizer)
        except NotUnderstood as reason:
            log.info("the tokenizers library cuts all texts of this model: %s", reason)
            return None

    def _is_faithful(self, markers: Iterable[str]) -> bool:
        """Whether parts really tokenize as in the whole: tried, since no file promises it."""
        text = _PROBE + "".join(f"{marker}{_PROBE} x {marker}\n" for marker in markers)
        whole = self._by_library([text])
        return b"".join(self.encode_segments(self.segments(text))) == b"".join(whole)


def _hard(token: AddedToken) -> bool:
    return bool(token.special) and not (
        token.normalized or token.lstrip or token.rstrip or token.single_word
    )
