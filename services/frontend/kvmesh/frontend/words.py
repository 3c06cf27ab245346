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

from kvmesh.frontend.detokenize import CHAR_OF_BYTE
from kvmesh.frontend.pretokenize import NotUnderstood, Splitter

LONGEST_WORD = 48
WORDS = 32_768


class WordMemo(dict[str, bytes]):
    """Packed tokens of words; those not asked for since `limit` others came are forgotten.

    Words are no secret of a tenant's as texts are: it holds no two of them together.
    """

    def __init__(self, model: BPE, limit: int = WORDS) -> None:
        super().__init__()
        self._model = model
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
        self._marker = _marker(added.values())

    def encode(self, text: str) -> bytes | None:
        """Packed tokens; None for a text that must be left to the library."""
        pieces = self._marker.split(text) if self._marker else [text]
        if self._normalizer is not None and not text.isascii():
            pieces[::2] = map(self._normalizer.normalize_str, pieces[::2])
        if not all(map(self._splitter.knows, pieces[::2])):
            return None
        parts: list[bytes] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                parts.append(self._added[piece])
            elif piece:
                parts.extend(self._plain(piece))
        return b"".join(parts)

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
    longest_first = sorted((t.content for t in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if tokens else None
