"""A sentencepiece model as the `tokenizer.json` that gives the same tokens.

Llama 1 and 2, Mistral and Gemma are published with such a `tokenizer.model`. The format is a
protocol buffer (`sentencepiece_model.proto` of google/sentencepiece).
"""

import base64
import re
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

SPACE = "▁"
UNIGRAM, BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNK_ID, _BOS_ID, _EOS_ID = 3, 35, 40, 41, 42
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPES = 2, 3, 4, 5


class PieceType(IntEnum):
    """The kinds of pieces; only normal ones are merged."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class VocabularyPiece(NamedTuple):
    """A token, its score and its `PieceType`."""

    text: str
    score: float
    type: int


class SentencepieceModel(NamedTuple):
    """The parts of a model that decide its tokens; `charsmap` is empty if it normalises nothing."""

    pieces: list[VocabularyPiece]
    type: int
    byte_fallback: bool
    unk: int
    bos: int
    eos: int
    charsmap: bytes
    dummy_prefix: bool
    removes_spaces: bool
    escapes: bool

    def text(self, number: int) -> str | None:
        """The text of a token; None if there is none of this id."""
        return self.pieces[number].text if 0 <= number < len(self.pieces) else None


def read_sentencepiece(data: bytes) -> SentencepieceModel:
    """Decode a model; raises ValueError."""
    fields = list(_fields(data))
    pieces = [_piece(_bytes(value)) for number, value in fields if number == _PIECES]
    trainer, normalizer = (
        {n: v for number, value in fields if number == part for n, v in _fields(_bytes(value))}
        for part in (_TRAINER, _NORMALIZER)
    )
    kind = _int(trainer.get(_MODEL_TYPE, UNIGRAM))
    if not pieces or kind not in (UNIGRAM, BPE):
        raise ValueError("it is no sentencepiece model of BPE or unigram pieces")
    return SentencepieceModel(
        pieces=pieces,
        type=kind,
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
        unk=_int(trainer.get(_UNK_ID, 0)),
        bos=_int(trainer.get(_BOS_ID, 1)),
        eos=_int(trainer.get(_EOS_ID, 2)),
        charsmap=_bytes(normalizer.get(_CHARSMAP, b"")),
        dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
        removes_spaces=bool(normalizer.get(_EXTRA_SPACES, 1)),
        escapes=bool(normalizer.get(_ESCAPES, 1)),
    )


def _piece(data: bytes) -> VocabularyPiece:
    found = dict(_fields(data))
    (score,) = struct.unpack("<f", _bytes(found.get(2, bytes(4))))
    return VocabularyPiece(
        _bytes(found.get(1, b"")).decode(), score, _int(found.get(3, PieceType.NORMAL))
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The numbers and values of a message; raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            count, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            count = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError("it is no protocol buffer")
        if at + count > len(data):
            raise ValueError("it is truncated")
        yield key >> 3, data[at : at + count]
        at += count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it is truncated")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("it is no protocol buffer")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("it is no sentencepiece model")
    return value


def _int(value: int | bytes) -> int:
    """A number of 32 bits; negative ones say that a token does not exist."""
    if isinstance(value, bytes):
        raise ValueError("it is no sentencepiece model")
    return value - (1 << 64) if value >> 63 else value


def tokenizer_of(
    model: SentencepieceModel, *, prefix: bool, prefixes_all: bool, first: str = "", last: str = ""
) -> dict[str, Any]:
    """The content of `tokenizer.json`, without added tokens but the model's own.

    `prefix` has a space before the text, or, if it `prefixes_all`, before each part of it between
    special tokens. `first` and `last` are tokens that are added to a text.
    """
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    names = {token: ids[token] for token in (first, last) if token in ids}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
        "pre_tokenizer": _pre_tokenizer(model, prefix, prefixes_all),
        "post_processor": _post_processor(first, last, names) if names else None,
        "decoder": {"type": "Sequence", "decoders": _decoders(prefix)},
        "model": _bpe(model) if model.type == BPE else _unigram(model),
    }


def _bpe(model: SentencepieceModel) -> dict[str, Any]:
    vocabulary = {piece.text: number for number, piece in enumerate(model.pieces)}
    normal = {p.text: p.score for p in model.pieces if p.type == PieceType.NORMAL}
    merges = [
        (-score, vocabulary[text], text[:at], text[at:])
        for text, score in normal.items()
        for at in range(1, len(text))
        if text[:at] in normal and text[at:] in normal
    ]
    return {
        "type": "BPE",
        "unk_token": model.text(model.unk),
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": bool(_user_defined(model)),  # they are cut out whole
        "vocab": vocabulary,
        "merges": [[left, right] for _, _, left, right in sorted(merges)],
    }


def _unigram(model: SentencepieceModel) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": model.unk,
        "byte_fallback": model.byte_fallback,
        "vocab": [[piece.text, piece.score] for piece in model.pieces],
    }


def _normalizers(model: SentencepieceModel) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if model.charsmap:
        text = base64.b64encode(model.charsmap).decode()
        found.append({"type": "Precompiled", "precompiled_charsmap": text})
    if model.removes_spaces:
        found += [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    return [*found, _replace({"String": " "}, SPACE)] if model.escapes else found


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _pre_tokenizer(
    model: SentencepieceModel, prefix: bool, prefixes_all: bool
) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if prefix:
        # one step would put no space before a text that begins with one
        # a text whose first spaces were removed does not count as the first part
        scheme = "always" if prefixes_all or model.removes_spaces else "first"
        steps += [_metaspace(" ", scheme), _metaspace(SPACE, "never")]
    if pieces := _user_defined(model):
        pattern = "|".join(re.escape(p) for p in sorted(pieces, key=len, reverse=True))
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        steps.append(split | {"invert": False})
    return {"type": "Sequence", "pretokenizers": steps} if steps else None


def _metaspace(replacement: str, scheme: str) -> dict[str, Any]:
    return {
        "type": "Metaspace",
        "replacement": replacement,
        "prepend_scheme": scheme,
        "split": False,
    }


def _user_defined(model: SentencepieceModel) -> list[str]:
    return [piece.text for piece in model.pieces if piece.type == PieceType.USER_DEFINED]


def _decoders(prefix: bool) -> list[dict[str, Any]]:
    plain = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return [*plain, strip] if prefix else plain


def _post_processor(first: str, last: str, names: dict[str, int]) -> dict[str, Any]:
    def token(text: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": text, "type_id": 0}}] if text in names else []

    def part(name: str) -> list[dict[str, Any]]:
        return [*token(first), {"Sequence": {"id": name, "type_id": 0}}, *token(last)]

    special = {t: {"id": t, "ids": [number], "tokens": [t]} for t, number in names.items()}
    return {
        "type": "TemplateProcessing",
        "single": part("A"),
        "pair": [*part("A"), *part("B")],
        "special_tokens": special,
    }
