"""Text encoder that reuses the tokens of segments seen before.

A tokenizer splits text at special tokens first, so the tokens of a segment between two of them do
not depend on the text around it. In a rendered conversation special tokens delimit the messages:
a turn repeats the segments of the turn before, and only new ones need the tokenizer.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from threading import Lock

from tokenizers import AddedToken, Tokenizer

from kvmesh.frontend.tokenizer.byte_level_bpe import UnsupportedText, WordEncoder, packed
from kvmesh.frontend.tokenizer.pretokenizer import UnsupportedTokenizer
from kvmesh.frontend.tokenizer.text_slices import (
    SAMPLE_TEXT,
    SLICE,
    alternation,
    find_all,
    split_at_words,
)
from kvmesh.runtime.lru import LruCache

log = logging.getLogger(__name__)
ENTRY_BYTES = 300
_PROBE = "  Hello there,\n\n the 12345 quick  foxes'll jump — naïve 日本 🦀\n\n\n"


class SegmentMemo:
    """LRU cache of packed tokens by (tenant, text), bounded by `limit` bytes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._entries: LruCache[tuple[int, str], bytes] = LruCache(limit, _size)
        self._lock = Lock()

    @property
    def size(self) -> int:
        return self._entries.size

    def get(self, tenant: int, text: str) -> bytes | None:
        with self._lock:
            return self._entries.get((tenant, text))

    def put(self, tenant: int, text: str, tokens: bytes) -> None:
        key = (tenant, text)
        with self._lock:
            if key not in self._entries:
                self._entries.put(key, tokens)


def _size(key: tuple[int, str], tokens: bytes) -> int:
    text = key[1]
    # characters beyond Latin-1 take two or four bytes each
    width = 1 if text.isascii() else 4
    return ENTRY_BYTES + width * len(text) + len(tokens)


class TextEncoder:
    """Encoder of one tokenizer. `steps` and `text_steps` are slow and may run in any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        markers = [
            t.content for t in tokenizer.get_added_tokens_decoder().values() if _is_marker(t)
        ]
        self.longest_marker = max(map(len, markers), default=0)
        self._marker = re.compile(alternation(markers)) if markers else None
        self._bpe: WordEncoder | None = None
        self._splittable = False
        if not self._is_faithful(markers):
            self._marker = None
        self._splittable = self._splits_between_words()
        self._bpe = self._word_encoder()
        if self._bpe is not None and not self._is_faithful(markers):
            log.warning(
                "the tokenizer does not match its file; using the tokenizers library instead"
            )
            self._bpe = None

    @property
    def joins(self) -> bool:
        """True if the tokens of two parts of a text are tokens of the text, wherever it is cut."""
        parts = "a<", "|b"
        ids = [self._tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
        return self._tokenizer.decode([*ids[0], *ids[1]]) == "".join(parts)

    @property
    def longest_token(self) -> int | None:
        """Most bytes of text that one token can represent; None if unbounded."""
        return self._bpe.longest_token if self._bpe is not None else None

    def segments(self, text: str) -> list[str]:
        """Parts of `text` whose tokens, concatenated, are the tokens of `text`."""
        if self._marker is None:
            return [text]
        starts = [m.start() for m in find_all(self._marker, text, self.longest_marker)]
        edges = [0, *starts, len(text)]
        return [text[a:b] for a, b in pairwise(edges) if a < b]

    def steps(self, segment: str) -> Iterator[bytes]:
        """Packed tokens of a segment, in slices; adds no special tokens."""
        if self._bpe is not None:
            try:
                yield from self._bpe.steps(segment)
                return
            except UnsupportedText:
                pass  # raised before the first slice
        for part in split_at_words(segment) if self._splittable else (segment,):
            yield self._tokenize([part])[0]

    def encode_segments(self, segments: list[str]) -> list[bytes]:
        """Packed tokens of each segment."""
        return [b"".join(self.steps(segment)) for segment in segments]

    def text_steps(self, text: str) -> Iterator[bytes]:
        """Packed tokens of a text and of the special tokens that the tokenizer adds around it."""
        if len(text) < SLICE:
            yield packed(self._with_special(text))
            return
        sample, bare = self._with_special("x"), self._tokenize(["x"])[0]
        before, found, after = packed(sample).partition(bare)
        yield before
        for segment in self.segments(text):
            yield from self.steps(segment)
        yield after if found else b""

    def _with_special(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids

    def _tokenize(self, segments: list[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(segments, add_special_tokens=False)
        return [packed(encoding.ids) for encoding in encodings]

    def _splits_between_words(self) -> bool:
        """Test whether texts may be split between words; no tokenizer file states it."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if any(list(split_at_words(token.content, 1)) != [token.content] for token in added):
            return False
        parts = list(split_at_words(SAMPLE_TEXT, 1))
        return b"".join(self._tokenize(parts)) == self._tokenize([SAMPLE_TEXT])[0]

    def _word_encoder(self) -> WordEncoder | None:
        try:
            return WordEncoder(self._tokenizer)
        except UnsupportedTokenizer as reason:
            log.info("the tokenizers library encodes all texts of this model: %s", reason)
            return None

    def _is_faithful(self, markers: Iterable[str]) -> bool:
        """Test whether segments have the tokens of the whole text; no tokenizer file states it."""
        text = _PROBE + "".join(f"{marker}{_PROBE} x {marker}\n" for marker in markers)
        whole = self._tokenize([text])
        return b"".join(self.encode_segments(self.segments(text))) == b"".join(whole)


def _is_marker(token: AddedToken) -> bool:
    """True for special tokens, at which texts split into segments whatever surrounds them."""
    return bool(token.special) and not (
        token.normalized or token.lstrip or token.rstrip or token.single_word
    )
