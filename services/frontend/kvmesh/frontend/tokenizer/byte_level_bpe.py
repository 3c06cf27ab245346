"""Byte-level BPE word by word: what a word becomes does not depend on what stands around it.

The library finds its words anew in every text, which costs more than all else about a prompt.
Here words are found by a pattern of Python's and looked up; only a word that was not seen lately
is given to the library's model.
"""

import re
from array import array
from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from kvmesh.frontend.tokenizer.detokenizer import CHAR_OF_BYTE
from kvmesh.frontend.tokenizer.pretokenizer import NotUnderstood, Splitter
from kvmesh.frontend.tokenizer.text_slices import SLICE, any_of, composed_apart, find_all

LONGEST_WORD = 48
WORDS = 32_768
HUGE_WORD = 4096  # others wait while the library has one of fewer characters
COMPOSES = 3  # bytes of a text that may become one by NFC


class Unknown(Exception):
    """A text that must be left to the library."""


class WordMemo(dict[str, bytes]):
    """Packed tokens of words; those not asked for since `limit` others came are forgotten.

    Words are no secret of a tenant's as texts are: it holds no two of them together.
    """

    def __init__(self, model: BPE, limit: int = WORDS) -> None:
        super().__init__()
        self._model = model
        self._alone = Tokenizer(model)
        self._limit = limit
        self._before: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        tokens = self._before.get(word)
        if tokens is None:
            tokens = self._tokenize(word)
            if len(word) > LONGEST_WORD:
                return tokens
        if len(self) >= self._limit:
            self._before = dict(self)
            self.clear()
        self[word] = tokens
        return tokens

    def _tokenize(self, word: str) -> bytes:
        letters = "".join([CHAR_OF_BYTE[byte] for byte in word.encode()])
        if len(letters) > HUGE_WORD:  # a batch lets other threads go on
            return packed(self._alone.encode_batch_fast([letters], add_special_tokens=False)[0].ids)
        return packed([token.id for token in self._model.tokenize(letters)])


class WordEncoder:
    """Tokens of text as the whole tokenizer makes them, with no special tokens added.

    Raises NotUnderstood for a tokenizer that is anything but byte-level BPE in its usual form.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = tokenizer.model
        if not isinstance(model, BPE) or model.dropout:
            raise NotUnderstood("the model is not a fixed byte-pair encoding")
        if tokenizer.normalizer is not None and not _composes(tokenizer):
            raise NotUnderstood("the text is rewritten first")
        self._splitter = Splitter(tokenizer)
        self._normalizer = tokenizer.normalizer
        self._memo = WordMemo(model)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: packed([place]) for place, token in added.items()}
        self._longest_added = max(map(len, self._added), default=0)
        self._marker = _marker(added.values())
        self.longest_token = self._longest_token(tokenizer)

    def _longest_token(self, tokenizer: Tokenizer) -> int | None:
        vocabulary = tokenizer.get_vocab()
        if any(letter not in vocabulary for letter in CHAR_OF_BYTE.values()):
            return None  # such bytes leave no tokens at all
        longest = max(map(len, vocabulary))  # a letter stands for a byte, but not in added tokens
        longest = max([longest, *(len(text.encode()) for text in self._added)])
        return longest if self._normalizer is None else longest * COMPOSES

    def encode(self, text: str) -> bytes | None:
        """Packed tokens; None for a text that must be left to the library."""
        try:
            return b"".join(self.steps(text))
        except Unknown:
            return None

    def steps(self, text: str) -> Iterator[bytes]:
        """Packed tokens a slice at a time, some of them empty; raises Unknown before any token."""
        pieces = list(self._pieces(text))
        for place in range(0, len(pieces), 2):
            parts = []
            for part in composed_apart(pieces[place]):
                parts.append(self._composed(part))
                if len(part) >= SLICE:
                    yield b""
            pieces[place] = "".join(parts)
        for place, piece in enumerate(pieces):
            if place % 2:
                yield self._added[piece]
            elif piece:
                yield from self._plain(piece)

    def _pieces(self, text: str) -> Iterator[str]:
        """Plain texts and added tokens by turns."""
        place = 0
        if self._marker is not None:
            for match in find_all(self._marker, text, self._longest_added):
                yield text[place : match.start()]
                yield match[0]
                place = match.end()
        yield text[place:]

    def _composed(self, text: str) -> str:
        if self._normalizer is not None and not text.isascii():
            text = self._normalizer.normalize_str(text)
        if not self._splitter.knows(text):
            raise Unknown
        return text

    def _plain(self, text: str) -> Iterator[bytes]:
        tokens_of = self._memo.__getitem__
        for words in self._splitter.words(text):
            yield b"".join(map(tokens_of, words))


def packed(ids: list[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return array("I", ids).tobytes()


def _composes(tokenizer: Tokenizer) -> bool:
    """Whether the normalizer is NFC, which leaves ASCII alone."""
    return bool(tokenizer.normalizer.__getstate__() == b'{"type":"NFC"}')


def _marker(added: Iterable[AddedToken]) -> "re.Pattern[str] | None":
    """Finds added tokens; where several begin at one place the longest is meant."""
    tokens = list(added)
    if any(t.normalized or t.lstrip or t.rstrip or t.single_word for t in tokens):
        raise NotUnderstood("an added token takes in what stands beside it")
    return re.compile(any_of(t.content for t in tokens)) if tokens else None
