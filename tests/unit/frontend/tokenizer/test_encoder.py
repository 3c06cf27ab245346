"""Segments have the tokens of the whole text, and the segment memo is bounded."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from kvmesh.demo import model_dir
from kvmesh.frontend.tokenizer.encoder import SegmentMemo, TextEncoder

DEMO = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
ENCODER = TextEncoder(DEMO)
TEXT = 'The "fox" said: jump(over, 12 dogs);\nNext line [a] = {b: c}\n\n  naïve <x>'
PIECES = ["<|im_start|>", "<|im_end|>", "\n", " ", "  word", "naïve 🦀", "<think>", "12345", "<|"]


def ids(text: str) -> list[int]:
    return DEMO.encode(text, add_special_tokens=False).ids


def by_segments(encoder: TextEncoder, text: str) -> list[int]:
    packed = b"".join(encoder.encode_segments(encoder.segments(text)))
    return array("I", packed).tolist()


@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_segments_tokenize_like_the_whole(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert by_segments(ENCODER, text) == ids(text)
    assert "".join(ENCODER.segments(text)) == text


def test_a_turn_shares_all_its_segments_with_the_next() -> None:
    first = "<|im_start|>user\nHello<|im_end|>\n"
    longer = first + "<|im_start|>assistant\nHi<|im_end|>\n"
    assert ENCODER.segments(longer)[: len(ENCODER.segments(first))] == ENCODER.segments(first)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_a_marker_that_strips_spaces_is_no_border(flag: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    token = AddedToken("<|eats|>", special=True, normalized=False, **{flag: True})
    tokenizer.add_special_tokens([token])
    encoder = TextEncoder(tokenizer)
    text = "a  <|eats|>  b"
    assert by_segments(encoder, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_memo_evicts_the_least_recently_used() -> None:
    memo = SegmentMemo(limit=1000)
    memo.put(1, "first", b"1")
    memo.put(1, "second", b"2")
    assert memo.get(1, "first") == b"1"
    memo.put(1, "third", b"3")
    memo.put(1, "fourth", b"4")
    assert memo.get(1, "second") is None
    assert memo.get(1, "first") == b"1"
    assert memo.size <= 1000


def test_tenants_do_not_share_segments() -> None:
    memo = SegmentMemo(limit=10_000)
    memo.put(1, "text", b"1")
    assert memo.get(2, "text") is None


def test_an_entry_larger_than_the_memo_is_not_stored() -> None:
    memo = SegmentMemo(limit=1000)
    memo.put(1, "x" * 5000, b"1")
    assert memo.size == 0
    assert memo.get(1, "x" * 5000) is None


def test_a_text_for_the_library_is_split_between_words() -> None:
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    text = "𐌰𐌱 " + TEXT * 3000
    encoder = TextEncoder(tokenizer)
    steps = list(encoder.steps(text))
    assert len(steps) > 2
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(steps) == array("I", tokens).tobytes()


def test_texts_of_other_pre_tokenizers_are_not_split() -> None:
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    steps = list(TextEncoder(tokenizer).steps(TEXT * 3000))
    assert len(steps) == 1
