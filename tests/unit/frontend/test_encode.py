"""Tokens by parts are the tokens of the whole, and memory for them is bounded."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from kvmesh.demo import model_dir
from kvmesh.frontend.tokenizer.encoder import SegmentMemo, TextEncoder

DEMO = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
ENCODER = TextEncoder(DEMO)
PIECES = ["<|im_start|>", "<|im_end|>", "\n", " ", "  word", "naïve 🦀", "<think>", "12345", "<|"]


def ids(text: str) -> list[int]:
    return DEMO.encode(text, add_special_tokens=False).ids


def by_parts(encoder: TextEncoder, text: str) -> list[int]:
    packed = b"".join(encoder.encode_segments(encoder.segments(text)))
    return array("I", packed).tolist()


@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_parts_tokenize_as_the_whole(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert by_parts(ENCODER, text) == ids(text)
    assert "".join(ENCODER.segments(text)) == text


def test_a_turn_shares_all_its_parts_with_the_next() -> None:
    first = "<|im_start|>user\nHello<|im_end|>\n"
    longer = first + "<|im_start|>assistant\nHi<|im_end|>\n"
    assert ENCODER.segments(longer)[: len(ENCODER.segments(first))] == ENCODER.segments(first)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_a_marker_that_eats_spaces_is_no_border(flag: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    token = AddedToken("<|eats|>", special=True, normalized=False, **{flag: True})
    tokenizer.add_special_tokens([token])
    encoder = TextEncoder(tokenizer)
    text = "a  <|eats|>  b"
    assert by_parts(encoder, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_the_memo_forgets_what_was_not_used_for_longest() -> None:
    memo = SegmentMemo(limit=1000)
    memo.put(1, "first", b"1")
    memo.put(1, "second", b"2")
    assert memo.get(1, "first") == b"1"
    memo.put(1, "third", b"3")
    memo.put(1, "fourth", b"4")
    assert memo.get(1, "second") is None
    assert memo.get(1, "first") == b"1"
    assert memo.size <= 1000


def test_tenants_do_not_see_each_other_s_parts() -> None:
    memo = SegmentMemo(limit=10_000)
    memo.put(1, "text", b"1")
    assert memo.get(2, "text") is None


def test_what_is_larger_than_the_memo_is_not_kept() -> None:
    memo = SegmentMemo(limit=1000)
    memo.put(1, "x" * 5000, b"1")
    assert memo.size == 0
    assert memo.get(1, "x" * 5000) is None
