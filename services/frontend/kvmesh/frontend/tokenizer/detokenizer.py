"""Incremental detokenizers, which never split a character.

`ByteDetokenizer` looks up the bytes of byte-level BPE tokens, which most models use;
`StreamDetokenizer` uses the decoder of any other tokenizer.
"""

import codecs
import re
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

Utf8Decoder = codecs.getincrementaldecoder("utf-8")  # looked up once, not for each answer
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # for characters that SentencePiece lacks


class Detokenizer(Protocol):
    """Incremental detokenizer of one sequence."""

    def feed(self, ids: list[int]) -> str:
        """The text that `ids` complete; bytes of an incomplete character wait for the next call."""
        ...

    def finish(self) -> str:
        """The rest of the text; U+FFFD replaces an incomplete character."""
        ...

    def tokens_of(self, ids: list[int], text: str, start: int, end: int) -> tuple[int, int]:
        """The tokens that hold the characters `start` to `end` of `text`, as a range of `ids`.

        `ids` are the last ones fed, and `text` is what they gave.
        """
        ...


class ByteTable:
    """The bytes of every token id of a byte-level tokenizer; `hidden` ids have none."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        added = tokenizer.get_added_tokens_decoder()
        table = [b""] * (max(tokenizer.get_vocab().values()) + 1)
        byte_of = _BYTE_OF_CHAR
        for text, token_id in tokenizer.get_vocab().items():
            if token_id in hidden:
                continue
            mapped = token_id not in added and all(c in byte_of for c in text)
            table[token_id] = bytes(byte_of[c] for c in text) if mapped else text.encode()
        self.table = table


class ByteDetokenizer:
    """Joins table entries and decodes UTF-8 incrementally."""

    def __init__(self, table: ByteTable) -> None:
        self._table = table.table
        self._decoder = Utf8Decoder("replace")
        self._decode = self._decoder.decode

    def feed(self, ids: list[int]) -> str:
        table = self._table
        try:
            if len(ids) == 1:
                return self._decode(table[ids[0]])
            return self._decode(b"".join(map(table.__getitem__, ids)))
        except IndexError:
            return self._decode(b"".join([table[i] for i in ids if i < len(table)]))

    def finish(self) -> str:
        return self._decode(b"", True)

    def tokens_of(self, ids: list[int], text: str, start: int, end: int) -> tuple[int, int]:
        if start == 0 and end == len(text):
            return 0, len(ids)
        sizes = [len(self._table[i]) if i < len(self._table) else 0 for i in ids]
        # bytes that came before `ids`: the beginning of their first character
        earlier = len(text.encode()) + len(self._decoder.getstate()[0]) - sum(sizes)
        first, last = len(text[:start].encode()), len(text[:end].encode())
        return _range(sizes, first - earlier, last - earlier)


class StreamDetokenizer:
    """Uses the `tokenizers` library's incremental decoder; works for any tokenizer."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)
        self._pending: list[int] = []
        self._parts: list[str] = []  # of the last tokens

    def feed(self, ids: list[int]) -> str:
        self._parts = parts = []
        for token_id in ids:
            part = None
            if token_id not in self._hidden:
                part = self._stream.step(self._tokenizer, token_id)
                self._pending.append(token_id)
            if part is not None:
                self._pending.clear()
            parts.append(part or "")
        return "".join(parts)

    def finish(self) -> str:
        rest = self._tokenizer.decode(self._pending, skip_special_tokens=False)
        return "\ufffd" if "\ufffd" in rest else ""

    def tokens_of(self, ids: list[int], text: str, start: int, end: int) -> tuple[int, int]:
        return _range(list(map(len, self._parts)), start, end)


def _range(sizes: list[int], start: int, end: int) -> tuple[int, int]:
    """The range of the pieces of these sizes that hold what is from `start` to `end`."""
    ends = list(accumulate(sizes))
    return bisect_right(ends, start), min(bisect_left(ends, end) + 1, len(ends))


class TokenTexts:
    """The bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._hidden = hidden

    def is_shown(self, token: int) -> bool:
        """False for ids without text, such as the end of a turn."""
        return token not in self._hidden

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token, perhaps of an incomplete character."""
        text = self._tokenizer.id_to_token(token) or ""
        if token in self._added:
            return text.encode()
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(match[1])
        if all(c in _BYTE_OF_CHAR for c in text):
            return bytes(_BYTE_OF_CHAR[c] for c in text)
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


class DetokenizerFactory:
    """Creates detokenizers of one tokenizer; `hidden` ids, such as end of turn, have no text."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._table = ByteTable(tokenizer, hidden) if is_byte_level(tokenizer_json) else None

    def decode(self, ids: list[int]) -> str:
        """The text of all tokens, hidden ones included."""
        if self._table is None or not self._hidden.isdisjoint(ids):
            return self._tokenizer.decode(ids, skip_special_tokens=False)
        detokenizer = ByteDetokenizer(self._table)
        return detokenizer.feed(ids) + detokenizer.finish()

    def create(self) -> Detokenizer:
        if self._table is not None:
            return ByteDetokenizer(self._table)
        return StreamDetokenizer(self._tokenizer, self._hidden)


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


def is_byte_level(tokenizer_json: bytes) -> bool:
    """True if the tokenizer's decoder is exactly the inverse of GPT-2's byte-to-character map."""
    decoder = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).decoder or {}
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders", [])
        decoder = steps[0] if len(steps) == 1 else {}
    return decoder.get("type") == "ByteLevel"


def _byte_of_char() -> dict[str, int]:
    """Inverse of GPT-2's map: printable bytes map to themselves, the others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + n): b for n, b in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()
CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}
