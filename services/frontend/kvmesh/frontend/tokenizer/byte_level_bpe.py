"""Byte-level BPE with a memo of words: a word's tokens do not depend on its context.

The `tokenizers` library splits every text anew, which is the largest cost of preprocessing a
prompt. Here a memo holds the tokens of words; only words that were not seen lately reach the
library's model. Native code finds the words of ASCII text, a Python pattern those of other text.
"""

import re
import secrets
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from kvmesh._native import WordTokens
from kvmesh.frontend.tokenizer.detokenizer import CHAR_OF_BYTE
from kvmesh.frontend.tokenizer.pretokenizer import Splitter, UnsupportedTokenizer
from kvmesh.frontend.tokenizer.text_slices import (
    SAMPLE_TEXT,
    SLICE,
    alternation,
    find_all,
    split_at_words,
    split_for_nfc,
)

LONGEST_WORD = 48
WORDS = 32_768
HUGE_WORD = 4096  # characters; longer words are tokenized without holding the GIL
LONGEST_PART = 2 * SLICE
MIXED_SLICE = 512  # characters of text that is not all ASCII, of which parts may be
NFC_SHRINK = 3  # bytes of a text that NFC may turn into one


class UnsupportedText(Exception):
    """Only the library can tokenize this text."""


class WordMemo(dict[str, bytes]):
    """Packed tokens of words in two generations; each new one evicts words unused in the last.

    Tenants share it: single words, unlike texts, reveal nothing about a tenant's prompts.
    """

    def __init__(self, model: BPE, limit: int = WORDS) -> None:
        super().__init__()
        self._model = model
        self._tokenizer = Tokenizer(model)
        self._limit = limit
        self._previous: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        tokens = self._previous.get(word)
        if tokens is None:
            tokens = self._tokenize(word)
            if len(word) > LONGEST_WORD:
                return tokens
        if len(self) >= self._limit:
            self._previous = dict(self)
            self.clear()
        self[word] = tokens
        return tokens

    def _tokenize(self, word: str) -> bytes:
        letters = "".join([CHAR_OF_BYTE[byte] for byte in word.encode()])
        if len(letters) > HUGE_WORD:  # a batch call releases the GIL
            encodings = self._tokenizer.encode_batch_fast([letters], add_special_tokens=False)
            return packed(encodings[0].ids)
        return packed([token.id for token in self._model.tokenize(letters)])


class WordEncoder:
    """Encodes text exactly as the tokenizer does without adding special tokens.

    Raises UnsupportedTokenizer unless the tokenizer is byte-level BPE in its usual form.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = tokenizer.model
        if not isinstance(model, BPE) or model.dropout:
            raise UnsupportedTokenizer("the model is not a deterministic byte-pair encoding")
        if tokenizer.normalizer is not None and not _is_nfc(tokenizer):
            raise UnsupportedTokenizer("a normalizer other than NFC")
        self._splitter = Splitter(tokenizer)
        self._normalizer = tokenizer.normalizer
        self._memo = WordMemo(model)
        self._native = _native_words(self._splitter)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: packed([token_id]) for token_id, token in added.items()}
        self._longest_added = max(map(len, self._added), default=0)
        self._marker = _marker(added.values())
        self.longest_token = self._longest_token(tokenizer)

    def _longest_token(self, tokenizer: Tokenizer) -> int | None:
        vocabulary = tokenizer.get_vocab()
        if any(letter not in vocabulary for letter in CHAR_OF_BYTE.values()):
            return None  # some bytes yield no token, so that no length is certain
        longest = max(map(len, vocabulary))  # a letter is a byte, except in added tokens
        longest = max([longest, *(len(text.encode()) for text in self._added)])
        return longest if self._normalizer is None else longest * NFC_SHRINK

    def encode(self, text: str) -> bytes | None:
        """Packed tokens; None for a text that only the library can tokenize."""
        try:
            return b"".join(self.steps(text))
        except UnsupportedText:
            return None

    def steps(self, text: str) -> Iterator[bytes]:
        """Packed tokens in slices, some empty; raises UnsupportedText before the first slice."""
        pieces = list(self._pieces(text))
        for index in range(0, len(pieces), 2):
            if len(pieces[index]) < SLICE:
                pieces[index] = self._normalize(pieces[index])
                continue
            parts = []
            for part in split_for_nfc(pieces[index]):
                parts.append(self._normalize(part))
                if len(part) >= SLICE:
                    yield b""
            pieces[index] = "".join(parts)
        for index, piece in enumerate(pieces):
            if index % 2:
                yield self._added[piece]
            elif piece:
                yield from self._plain(piece)

    def _pieces(self, text: str) -> Iterator[str]:
        """Alternating plain texts and added tokens, beginning and ending with a text."""
        start = 0
        if self._marker is not None:
            if len(text) < SLICE:
                yield from self._marker.split(text)
                return
            for match in find_all(self._marker, text, self._longest_added):
                yield text[start : match.start()]
                yield match[0]
                start = match.end()
        yield text[start:]

    def _normalize(self, text: str) -> str:
        if self._normalizer is not None and not text.isascii():
            text = self._normalizer.normalize_str(text)
        if not self._splitter.supports(text):
            raise UnsupportedText
        return text

    def _plain(self, text: str) -> Iterator[bytes]:
        parts: Iterable[str] = (text,)
        if self._splitter.splittable:
            parts = split_at_words(text, SLICE if text.isascii() else MIXED_SLICE)
        tokens_of = self._memo.__getitem__
        for part in parts:
            if self._native is not None and part.isascii() and len(part) <= LONGEST_PART:
                yield self._known(self._native, part)
                continue
            for words in self._splitter.words(part):
                yield b"".join(map(tokens_of, words))

    def _known(self, native: WordTokens, text: str) -> bytes:
        """Packed tokens of ASCII text; `native` gets those of words that are new to it."""
        found = native.find(text)
        for at, part in enumerate(found):
            if isinstance(part, str):
                found[at] = tokens = self._memo[part]
                native.keep(part, tokens)
        return b"".join(found)  # type: ignore[arg-type]  # no text is left


def _native_words(splitter: Splitter) -> WordTokens | None:
    """The native splitter and memo; None if it does not split like the Python one."""
    patterns = splitter.native_patterns()
    if patterns is None:
        return None
    native = WordTokens(patterns, secrets.randbits(64))
    sample = SAMPLE_TEXT.encode("ascii", "ignore").decode()
    same = native.words(sample) == list(chain.from_iterable(splitter.words(sample)))
    return native if same else None


def packed(ids: list[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return array("I", ids).tobytes()


def _is_nfc(tokenizer: Tokenizer) -> bool:
    """True if the normalizer is NFC, which does not change ASCII."""
    return bool(tokenizer.normalizer.__getstate__() == b'{"type":"NFC"}')


def _marker(added: Iterable[AddedToken]) -> "re.Pattern[str] | None":
    """A pattern that finds added tokens, the longest first; None if there are none."""
    tokens = list(added)
    if any(t.normalized or t.lstrip or t.rstrip or t.single_word for t in tokens):
        raise UnsupportedTokenizer("an added token depends on the text around it")
    return re.compile(f"({alternation(t.content for t in tokens)})") if tokens else None
