"""A cached prefix never changes the tokens of a conversation."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from kvmesh.demo import model_dir
from kvmesh.frontend.conversation import RenderedPrompt
from kvmesh.frontend.tokenizer.encoder import TextEncoder
from kvmesh.frontend.tokenizer.prefix_cache import (
    EncodedPrompt,
    Key,
    PrefixTokenCache,
    text_pieces,
)

PIECES = ["<|im_start|>", "<|im_end|>", "<|im_end|>\n<|im_start|>", "\n", "user", "a word", "<|im"]
KEY = (1, 1)


def encoder() -> TextEncoder:
    """An encoder with a special token that extends another one."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    longer = AddedToken("<|im_end|>\n<|im_start|>user", special=True, normalized=False)
    tokenizer.add_special_tokens([longer])
    return TextEncoder(tokenizer)


ENCODER = encoder()
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def encoded(
    cache: PrefixTokenCache, text: str, key: Key = KEY, cuts: Sequence[int] = ()
) -> tuple[EncodedPrompt, int]:
    """The encoded text, and how many of its characters were cached."""
    prompt = RenderedPrompt(text, cuts=cuts)
    cached = cache.get(key, prompt, ENCODER.longest_marker)
    segments = [piece.text for piece in text_pieces(prompt, ENCODER, cached.end)]
    whole = cached.extended(prompt, segments, ENCODER.encode_segments(segments))
    cache.put(key, whole)
    return whole, cached.end


@given(TEXTS, st.lists(st.tuples(st.integers(0, 80), TEXTS), max_size=4))
def test_tokens_and_edges_are_those_of_the_whole(first: str, turns: list[tuple[int, str]]) -> None:
    cache = PrefixTokenCache(1 << 20)
    encoded(cache, first)
    text = first
    for common, added in turns:
        text = text[:common] + added
        assert encoded(cache, text)[0] == encoded(PrefixTokenCache(0), text)[0]


CUTS = st.lists(st.integers(1, 80), max_size=4, unique=True).map(sorted)


@given(TEXTS, CUTS, st.lists(st.tuples(st.integers(0, 80), TEXTS, CUTS), max_size=4))
def test_other_cuts_of_the_same_text_are_another_prompt(
    first: str, cuts: list[int], turns: list[tuple[int, str, list[int]]]
) -> None:
    cache = PrefixTokenCache(1 << 20)
    encoded(cache, first, cuts=[cut for cut in cuts if cut < len(first)])
    text = first
    for common, added, cuts in turns:
        text = text[:common] + added
        inside = [cut for cut in cuts if cut < len(text)]
        once = encoded(cache, text, cuts=inside)[0]
        assert once == encoded(PrefixTokenCache(0), text, cuts=inside)[0]


def test_a_turn_encodes_only_its_new_text() -> None:
    cache = PrefixTokenCache(1 << 20)
    turn = "<|im_start|>user\nHello<|im_end|>\n"
    history = turn * 40
    assert encoded(cache, history + "<|im_start|>assistant\n<think>")[1] == 0
    whole, cached = encoded(cache, history + "<|im_start|>assistant\nHi<|im_end|>\n" + turn)
    assert len(history) - 3 * len(turn) <= cached <= len(history)
    assert whole.tokens == b"".join(ENCODER.encode_segments(ENCODER.segments(whole.text)))


def test_memory_is_bounded_and_the_oldest_entry_is_evicted() -> None:
    cache = PrefixTokenCache(20_000)
    text = "<|im_start|>user\nHello<|im_end|>\n" * 100
    for key in ((1, 1), (1, 2), (2, 1)):
        encoded(cache, text, key)
    assert 0 < cache.size <= 20_000
    assert not encoded(cache, text, (1, 1))[1]
    assert encoded(cache, text, (2, 1))[1]


def test_an_entry_larger_than_the_limit_is_not_stored() -> None:
    cache = PrefixTokenCache(1000)
    encoded(cache, "<|im_start|>user\nHello<|im_end|>\n" * 100)
    assert cache.size == 0
