"""The word encoder equals the library; unsupported tokenizers are rejected."""

from array import array
from functools import cache
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from kvmesh._native import WordTokens
from kvmesh.demo import model_dir
from kvmesh.frontend.tokenizer import pretokenizer
from kvmesh.frontend.tokenizer.byte_level_bpe import WordEncoder, WordMemo
from kvmesh.frontend.tokenizer.encoder import TextEncoder
from kvmesh.frontend.tokenizer.pretokenizer import Splitter, UnsupportedTokenizer
from kvmesh.frontend.tokenizer.text_slices import SLICE, split_at_words

TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + TAIL,
)
ADDED = ["<think>", "<|im_start|>"]
PIECES = [
    *("<think>", "<|im_start|>", "<|im", "  ", "\n\n", "\r\n", "\t", " word", "Word's", "WE'LL"),
    *(
        "'ſ",
        "12345",
        "½",
        "naïve",
        "e\u0301",
        "日本語",
        "ひらがな",
        "—",
        "🦀",
        "🄀",
        "🇳🇴",
        "𝒳",
        "{'a': [1]}",
        "\x1c",
        "\u2028",
    ),
    *("\ufa6c", "ǅ", "\u00a0", "İ", "\u0345", "ẞ", "/n/", "K"),
]


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(model_dir() / "tokenizer.json"))


def splits(*patterns: str) -> PreTokenizer:
    steps = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def pipeline(name: str) -> Tokenizer:
    tokenizer = demo()
    match name:
        case "gpt2":
            tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        case "qwen":
            tokenizer.pre_tokenizer = splits(QWEN)
            tokenizer.normalizer = normalizers.NFC()
        case "llama":
            tokenizer.pre_tokenizer = splits(LLAMA)
        case "o200k":
            tokenizer.pre_tokenizer = splits(O200K)
        case "deepseek":
            tokenizer.pre_tokenizer = splits(*DEEPSEEK)
        case "string":
            space = Split("  ", "isolated")
            tokenizer.pre_tokenizer = Sequence([space, ByteLevel(add_prefix_space=False)])
    return tokenizer


@cache
def encoder(name: str) -> WordEncoder:
    return WordEncoder(pipeline(name))


PIPELINES = ["demo", "gpt2", "qwen", "llama", "o200k", "deepseek", "string"]
texts = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=20).map("".join))


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=60)
@example("".join(PIECES))
@given(texts)
def test_tokens_equal_those_of_the_library(name: str, text: str) -> None:
    found = encoder(name).encode(text)
    whole = pipeline(name).encode(text, add_special_tokens=False).ids
    if found is None:
        assert max(normalizers.NFC().normalize_str(text)) > "\uffff" or max(text) > "\uffff"
    else:
        assert array("I", found).tolist() == whole


ascii_texts = st.one_of(
    st.text(st.characters(max_codepoint=127)),
    st.lists(st.sampled_from([p for p in PIECES if p.isascii()]), max_size=20).map("".join),
)


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=100)
@given(ascii_texts)
def test_native_words_are_those_of_the_python_splitter(name: str, text: str) -> None:
    splitter = Splitter(pipeline(name))
    patterns = splitter.native_patterns()
    assert patterns is not None
    assert WordTokens(patterns, 0).words(text) == list(chain.from_iterable(splitter.words(text)))


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("huge", ["", " " * 3 * SLICE, "\n" * 3 * SLICE, "x" * 3 * SLICE])
def test_long_texts_have_the_tokens_of_the_library(
    name: str, huge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(piece for piece in PIECES if piece < "\uf000") * 400
    text = f"{text}{huge}{text}"
    whole = pipeline(name).encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(pretokenizer, "BATCH", 7)
    found = encoder(name).encode(text)
    assert found is not None
    assert array("I", found).tolist() == whole


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=60)
@example("".join(PIECES))
@example(" \u0301 x \u1680y\x1c z\x85 w \u180e a\u200b b")
@given(texts)
def test_a_text_may_be_split_at_all_its_word_borders(name: str, text: str) -> None:
    parts = pipeline(name).encode_batch_fast(
        list(split_at_words(text, 1)), add_special_tokens=False
    )
    whole = pipeline(name).encode(text, add_special_tokens=False).ids
    assert [token for part in parts for token in part.ids] == whole


@given(st.lists(st.sampled_from([" a", "b", " word", "longer", "x" * 60]), max_size=40))
def test_the_memo_is_bounded_and_stays_exact(words: list[str]) -> None:
    model = demo().model
    assert isinstance(model, models.BPE)
    small, fresh = WordMemo(model, limit=2), WordMemo(model)
    for word in words:
        assert small[word] == fresh[word]
        assert len(small) <= 2
    assert "x" * 60 not in fresh


def test_a_word_in_use_is_not_evicted() -> None:
    model = demo().model
    assert isinstance(model, models.BPE)
    memo = WordMemo(model, limit=2)
    kept = memo["kept"]
    for number in range(10):
        memo[f"w{number}"]
        assert memo["kept"] is kept


def check_unsupported(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedTokenizer):
        WordEncoder(tokenizer)
    text = "It's  a test,\n<think>naïve</think> of 12345 words."
    parts = TextEncoder(tokenizer).encode_segments([text])
    assert array("I", parts[0]).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "step",
    [
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Whitespace(),
        ByteLevel(add_prefix_space=True),
        splits(r"\p{L}+|."),
        splits(r"(?<=a)b|\s+"),
        splits(r"[\p{L}&&[a-z]]+"),
        splits(r"^\s+"),
        splits(r"(?i:[a-z]+)"),
        splits(r"\p{N}{1,3}+"),
        Sequence([pre_tokenizers.Digits(), ByteLevel(add_prefix_space=False)]),
        Sequence([Split(" ", "removed"), ByteLevel(add_prefix_space=False)]),
    ],
)
def test_other_pre_tokenizers_are_unsupported(step: PreTokenizer) -> None:
    tokenizer = demo()
    tokenizer.pre_tokenizer = step
    check_unsupported(tokenizer)


def test_a_normalizer_that_rewrites_ascii_is_unsupported() -> None:
    tokenizer = demo()
    tokenizer.normalizer = normalizers.Lowercase()
    check_unsupported(tokenizer)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_tokens_that_depend_on_context_are_unsupported(flag: str) -> None:
    tokenizer = demo()
    tokenizer.add_tokens([AddedToken("<eats>", **{"normalized": False, flag: True})])
    check_unsupported(tokenizer)


def test_other_models_are_unsupported() -> None:
    tokenizer = demo()
    tokenizer.model = models.WordPiece({"[UNK]": 0, "It": 1}, unk_token="[UNK]")
    check_unsupported(tokenizer)
