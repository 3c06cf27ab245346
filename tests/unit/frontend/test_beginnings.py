"""What is known of a conversation's beginning never changes what its tokens are."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from kvmesh.demo import model_dir
from kvmesh.frontend.tokenizer.encoder import TextEncoder
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt, Key, PrefixTokenCache

PIECES = ["<|im_start|>", "<|im_end|>", "<|im_end|>\n<|im_start|>", "\n", "user", "a word", "<|im"]
KEY = (1, 1)


def encoder() -> TextEncoder:
    """Of a tokenizer with a special token that goes on where another one ends."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    longer = AddedToken("<|im_end|>\n<|im_start|>user", special=True, normalized=False)
    tokenizer.add_special_tokens([longer])
    return TextEncoder(tokenizer)


ENCODER = encoder()
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def encoded(beginnings: PrefixTokenCache, text: str, key: Key = KEY) -> tuple[EncodedPrompt, int]:
    """The tokens of a text, and how many of its characters were known."""
    known = beginnings.find(key, text, ENCODER.longest_marker)
    segments = ENCODER.segments(text[known.end :])
    whole = known.extended(text, segments, ENCODER.encode_segments(segments))
    beginnings.keep(key, whole)
    return whole, known.end


@given(TEXTS, st.lists(st.tuples(st.integers(0, 80), TEXTS), max_size=4))
def test_tokens_and_edges_are_those_of_the_whole(first: str, turns: list[tuple[int, str]]) -> None:
    beginnings = PrefixTokenCache(1 << 20)
    encoded(beginnings, first)
    text = first
    for kept, added in turns:
        text = text[:kept] + added
        assert encoded(beginnings, text)[0] == encoded(PrefixTokenCache(0), text)[0]


def test_a_turn_needs_only_what_it_adds() -> None:
    beginnings = PrefixTokenCache(1 << 20)
    turn = "<|im_start|>user\nHello<|im_end|>\n"
    begun = turn * 40
    assert encoded(beginnings, begun + "<|im_start|>assistant\n<think>")[1] == 0
    whole, known = encoded(beginnings, begun + "<|im_start|>assistant\nHi<|im_end|>\n" + turn)
    assert len(begun) - 3 * len(turn) <= known <= len(begun)
    assert whole.tokens == b"".join(ENCODER.encode_segments(ENCODER.segments(whole.text)))


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    beginnings = PrefixTokenCache(20_000)
    text = "<|im_start|>user\nHello<|im_end|>\n" * 100
    for key in ((1, 1), (1, 2), (2, 1)):
        encoded(beginnings, text, key)
    assert 0 < beginnings.size <= 20_000
    assert not encoded(beginnings, text, (1, 1))[1]
    assert encoded(beginnings, text, (2, 1))[1]


def test_what_is_larger_than_all_of_the_memory_is_not_kept() -> None:
    beginnings = PrefixTokenCache(1000)
    encoded(beginnings, "<|im_start|>user\nHello<|im_end|>\n" * 100)
    assert beginnings.size == 0
